"""``system_fingerprint``: equal for two servers whose answers to one seed may be compared."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

import treadle

if TYPE_CHECKING:
    from treadle.plugins import PluginManager

__all__ = ("fingerprint",)


def fingerprint(plugins: PluginManager, *parts: Any) -> str:
    """``fp_`` and twelve hex digits, of this treadle's version, of every usable plugin's key,
    distribution, version and generation, and of ``parts`` (plain data and structs).

    The same in every process and on every machine.
    """
    data = msgspec.json.encode(
        [treadle.__version__, plugins.lock(), parts], enc_hook=repr, order="deterministic"
    )
    return f"fp_{hashlib.sha256(data).hexdigest()[:12]}"
