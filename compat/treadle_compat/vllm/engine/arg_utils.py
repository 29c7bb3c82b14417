"""Where vLLM has its options."""

from ..engine_args import AsyncEngineArgs, EngineArgs

__all__ = ("AsyncEngineArgs", "EngineArgs")
