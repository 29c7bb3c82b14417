"""API keys, of which only digests are kept."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from hashlib import sha256

__all__ = ("Keys",)


class Keys:
    """A set of keys. One that was sent is compared with all of them, in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def sent_in(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether one of the keys is in ``Authorization: Bearer`` or, without that, ``X-API-Key``.

        The names of ``headers`` are in lower case.
        """
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")
        return any_equal(sha256(key.strip()).digest(), self._digests)


def any_equal(digest: bytes, known: Iterable[bytes]) -> bool:
    found = False
    for one in known:
        found |= hmac.compare_digest(digest, one)
    return found
