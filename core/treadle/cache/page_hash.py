"""Page hashes: a chain of SHA-256 over everything that a full page's content depends on."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from struct import Struct

__all__ = ("PageHasher",)


class PageHasher:
    """Hashes of full pages over all tokens up to the page's end and the cache salt.

    Keys and values of a token depend on all tokens before it, so the hash of a page includes its
    predecessor's hash. The chain starts with a secret of the process: clients cannot compute a
    hash, and requests with different salts never share a page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._pack_page = Struct(f"<{page_size}q").pack
        self._secret = secrets.token_bytes(32)

    def root_hash(self, salt: str | None = None) -> bytes:
        """Return the hash that precedes a sequence's first page."""
        return hashlib.sha256(self._secret + (salt or "").encode()).digest()

    def extend_hashes(
        self, chain: list[bytes], root: bytes, tokens: Sequence[int], pages: int
    ) -> None:
        """Extend ``chain`` in place to the hashes of the first ``pages`` pages of ``tokens``."""
        size = self.page_size
        parent = chain[-1] if chain else root
        for index in range(len(chain), pages):
            content = self._pack_page(*tokens[index * size : (index + 1) * size])
            parent = hashlib.sha256(parent + content).digest()
            chain.append(parent)
