"""Tags that arrive in pieces: how much of a text may still become one."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ("partial_match_len",)


def partial_match_len(text: str, tags: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of one of ``tags``."""
    max_size = max(map(len, tags), default=1) - 1
    first_chars = {tag[0] for tag in tags}
    for size in range(min(max_size, len(text)), 0, -1):
        if text[-size] in first_chars and any(
            len(tag) > size and tag.startswith(text[-size:]) for tag in tags
        ):
            return size
    return 0
