"""Finds stop strings in text that arrives in pieces, in time linear in the text.

An Aho-Corasick automaton reads each character once. Its state is the longest end of the text that
is the beginning of a stop string, which is exactly what has to be held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ("StopMatcher", "StopStrings")


class StopStrings:
    """The automaton of one set of stop strings; shared by the outputs of a request. Immutable."""

    def __init__(self, strings: Sequence[str]) -> None:
        """``strings`` are not empty."""
        self.strings = tuple(dict.fromkeys(strings))
        self.trie: list[dict[str, int]] = [{}]
        self.depth = [0]
        # The longest stop string that ends in this state, or None.
        self.first_match: list[str | None] = [None]
        for text in self.strings:
            self._add(text)
        self.fail = [0] * len(self.trie)
        self._link()
        self.first = frozenset(self.trie[0])

    def _add(self, text: str) -> None:
        state = 0
        for char in text:
            if char not in self.trie[state]:
                self.trie.append({})
                self.depth.append(self.depth[state] + 1)
                self.first_match.append(None)
                self.trie[state][char] = len(self.trie) - 1
            state = self.trie[state][char]
        self.first_match[state] = text

    def _link(self) -> None:
        """Breadth first: the failure of a state is known before those of its children."""
        queue = deque(self.trie[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.trie[state].items():
                queue.append(child)
                fallback = self.fail[state]
                while fallback and char not in self.trie[fallback]:
                    fallback = self.fail[fallback]
                self.fail[child] = self.trie[fallback].get(char, 0)
                if self.first_match[child] is None:
                    self.first_match[child] = self.first_match[self.fail[child]]


class StopMatcher:
    """One text in which stop strings are looked for.

    ``matched`` is the stop string that was found; nothing may be fed after that.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._pending_text = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return what is certain to come before any stop string.

        When one is completed, the earliest to end wins, and of those that end together the
        longest; ``text`` behind it is dropped.
        """
        stops = self._stops
        state = self._state
        if not state and stops.first.isdisjoint(text):
            return text
        trie, fail, first_match = stops.trie, stops.fail, stops.first_match
        for i, char in enumerate(text):
            while state and char not in trie[state]:
                state = fail[state]
            state = trie[state].get(char, 0)
            if (matched := first_match[state]) is not None:
                self.matched = matched
                full_text = self._pending_text + text[: i + 1]
                self._pending_text = ""
                return full_text[: len(full_text) - len(matched)]
        self._state = state
        full_text = self._pending_text + text
        end = len(full_text) - stops.depth[state]
        self._pending_text = full_text[end:]
        return full_text[:end]

    def finish(self) -> str:
        """The text has ended: return what was held back."""
        text, self._pending_text = self._pending_text, ""
        self._state = 0
        return text
