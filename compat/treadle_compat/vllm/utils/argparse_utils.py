"""Where vLLM has the parser of its flags."""

from ..engine_args import FlexibleArgumentParser

__all__ = ("FlexibleArgumentParser",)
