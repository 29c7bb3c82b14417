"""Which distribution of weft provides which key: for ``install weft-awq`` in messages.

Written by tools/known_plugins.py from the pyprojects of the repository. DO NOT EDIT.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ("DISTRIBUTIONS", "KNOWN")

KNOWN: Mapping[str, str] = {
    "attention:sdpa": "weft-core",
    "executors:inline": "weft-core",
    "load_formats:dummy": "weft-core",
    "load_formats:pt": "weft-core",
    "load_formats:safetensors": "weft-core",
    "model_sources:file": "weft-core",
    "model_sources:hf": "weft-core",
    "policies:fcfs": "weft-core",
    "policies:priority": "weft-core",
    "renderers:jinja": "weft-core",
    "server:tokenize": "weft-server",
    "tokenizers:auto": "weft-core",
}

DISTRIBUTIONS: frozenset[str] = frozenset(
    {
        "weft-core",
        "weft-server",
    }
)
