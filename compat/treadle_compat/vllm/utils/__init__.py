"""Where vLLM 0.8 has the parser of its flags."""

from ..engine_args import FlexibleArgumentParser

__all__ = ("FlexibleArgumentParser",)
