"""Models of the transformers library as layers that RoundPipe can stream."""

from roundpipe.hf.causal_lm import causal_lm_to_sequential, is_causal_lm

__all__ = ["causal_lm_to_sequential", "is_causal_lm"]
