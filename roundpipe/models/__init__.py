"""Building blocks for language models that are trained through RoundPipe."""
