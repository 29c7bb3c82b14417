"""Where vLLM has its metrics."""

__all__: tuple[str, ...] = ()
