"""``system_fingerprint``: equal for two servers whose answers to one seed may be compared."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

import treadle
from treadle.plugins.selection import lock_of

if TYPE_CHECKING:
    from treadle.plugins import PluginManager

__all__ = ("fingerprint",)


def fingerprint(plugins: PluginManager, *about: Any) -> str:
    """``fp_`` and twelve hex digits, of this treadle's version, of every usable plugin's key,
    distribution, version and generation, and of ``about`` (plain data and structs).

    The same in every process and on every machine.
    """
    said = msgspec.json.encode(
        [treadle.__version__, lock_of(plugins.entries), about], enc_hook=repr, order="deterministic"
    )
    return f"fp_{hashlib.sha256(said).hexdigest()[:12]}"
