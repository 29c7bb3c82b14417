"""API keys, stored as digests only."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from hashlib import sha256

__all__ = ("Keys", "key_digest")


class Keys:
    """A set of keys. One that was sent is compared with all of them, in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def sent_in(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether one of the keys was sent; see ``key_digest``."""
        return any_equal(key_digest(headers), self._digests)


def key_digest(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the digest of the key in ``Authorization: Bearer`` or, without that, ``X-API-Key``.

    The names of ``headers`` are in lower case.
    """
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = headers.get(b"x-api-key", b"")
    return sha256(key.strip()).digest()


def any_equal(digest: bytes, digests: Iterable[bytes]) -> bool:
    is_equal = False
    for candidate in digests:
        is_equal |= hmac.compare_digest(digest, candidate)
    return is_equal
