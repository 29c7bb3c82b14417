"""The interface between the core and its plugins: the only module that a plugin must import."""

from treadle.api import types
from treadle.api.hookspecs import Plugin, impl

__all__ = ("Plugin", "impl", "types")
