"""Where vLLM has its engines."""

__all__: tuple[str, ...] = ()
