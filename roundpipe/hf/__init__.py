"""Models of the transformers library as layers that RoundPipe can stream, and a Trainer for them."""

from typing import TYPE_CHECKING, Any

from roundpipe.hf.causal_lm import causal_lm_to_sequential, is_causal_lm

if TYPE_CHECKING:
    from roundpipe.hf.trainer import RoundPipeTrainer

__all__ = ["RoundPipeTrainer", "causal_lm_to_sequential", "is_causal_lm"]


def __getattr__(name: str) -> Any:
    if name == "RoundPipeTrainer":  # importing transformers' own takes seconds
        try:
            import transformers  # noqa: F401
        except ModuleNotFoundError as error:
            raise ImportError(
                'RoundPipeTrainer needs transformers and accelerate: pip install "roundpipe[hf]"'
            ) from error
        from roundpipe.hf.trainer import RoundPipeTrainer

        return RoundPipeTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
