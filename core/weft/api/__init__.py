"""The contract between the core and its plugins: the only module that a plugin must import."""

from weft.api import types
from weft.api.hookspecs import Plugin, impl

__all__ = ("Plugin", "impl", "types")
