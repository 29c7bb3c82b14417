"""Where vLLM has its classes for programs."""

__all__: tuple[str, ...] = ()
