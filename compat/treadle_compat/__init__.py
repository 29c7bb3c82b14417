"""The modules of ``treadle.compat``; import them under that name."""

__all__: tuple[str, ...] = ()
