"""What parsers of tool calls have in common: the text around calls, and what is not certain yet.

A piece of output may end in the middle of anything. Whatever a parser reads is either handed on as
a delta or kept, word for word, until it is certain what it is: a call that turns out to be none
comes out as the text that it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from treadle.api.parsers import Delta, TextDelta

__all__ = ("CallParser", "Prose", "Reader", "held")


def held(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of one of ``marks``."""
    longest = max(map(len, marks), default=1) - 1
    firsts = {mark[0] for mark in marks}
    for size in range(min(longest, len(text)), 0, -1):
        if text[-size] in firsts and any(
            len(mark) > size and mark.startswith(text[-size:]) for mark in marks
        ):
            return size
    return 0


class Reader(Protocol):
    """Reads one call; see ``treadle.api.calls.CallReader``."""

    begun: bool
    done: bool
    failed: bool

    @property
    def rest(self) -> str: ...

    def feed(self, text: str, at: int = 0) -> tuple[int, list[Delta]]: ...

    def finish(self) -> list[Delta]: ...


class Prose:
    """The text around calls. Blanks alone between two calls, or between a call and an end of the
    output, belong to the format and are dropped; any other text comes out as it is."""

    __slots__ = ("_begun", "_blank", "_called")

    def __init__(self) -> None:
        self._blank: list[str] = []
        self._begun = self._called = False

    def say(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._begun:
            return [TextDelta(text)]
        self._blank.append(text)
        if not text.strip():
            return []
        self._begun = True
        text = "".join(self._blank)
        self._blank.clear()
        return [TextDelta(text)]

    def call(self) -> None:
        """A call stands here."""
        self._blank.clear()
        self._begun, self._called = False, True

    def finish(self) -> list[Delta]:
        text = "".join(self._blank)
        self._blank.clear()
        return [TextDelta(text)] if text and not self._called else []


class CallParser:
    """The frame of a parser: it is in one mode at a time, and each mode reads on from a place in
    the text and returns the place up to which it has read.

    A subclass gives ``text`` (outside of calls) and ``after`` (behind a call). Marks and blanks that
    belong to the form are put into ``lead``, where they wait for the call that proves them to be
    none of the text; ``carry`` is the end of a piece that may be the beginning of a mark.
    """

    tags: Sequence[str] = ()
    """See ``treadle.api.parsers.Tagged``."""

    def __init__(self) -> None:
        self.mode: Callable[[str, int], int] = self.text
        self.lead: list[str] = []
        self.carry = ""
        self.calls = 0
        self._out: list[Delta] = []
        self._prose = Prose()
        self._reader: Reader | None = None

    def text(self, text: str, at: int) -> int:
        raise NotImplementedError

    def after(self, text: str, at: int) -> int:
        raise NotImplementedError

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        text, self.carry, at = self.carry + text, "", 0
        while at < len(text):
            at = self.mode(text, at)
        return self._taken()

    def finish(self) -> list[Delta]:
        if self._reader is not None:
            self._out += self._reader.finish()
            self._hand_on(self._reader)
            self.say("".join(self.lead) + self._reader.rest)
        elif self.mode != self.after:  # behind a call, what is left is the rest of its form
            self.say("".join(self.lead) + self.carry)
        self._out += self._prose.finish()
        self.lead.clear()
        self.carry, self._reader, self.mode = "", None, self.text
        return self._taken()

    def say(self, text: str) -> None:
        """``text`` is text."""
        self._out += self._prose.say(text)

    def call(self, reader: Reader) -> None:
        """A call may begin here; ``lead`` belongs to it."""
        self._reader = reader
        self.mode = self._call

    def give_up(self, at: int) -> int:
        """What stands in ``lead`` is text; go on from ``at`` as text."""
        self.say("".join(self.lead))
        self.lead.clear()
        self.mode = self.text
        return at

    def end(self, at: int) -> int:
        """A call's form ends at ``at``."""
        self.lead.clear()
        self.mode = self.text
        return at

    def find(self, text: str, at: int, mark: str) -> int:
        """The place behind the next ``mark``, with the text before it said; -1 if there is none,
        with all text said that cannot belong to one."""
        found = text.find(mark, at)
        if found >= 0:
            self.say(text[at:found])
            return found + len(mark)
        keep = held(text[max(at, len(text) - len(mark)) :], (mark,))
        self.say(text[at : len(text) - keep])
        self.carry = text[len(text) - keep :]
        return -1

    def expect(self, text: str, at: int, mark: str) -> int | None:
        """The place behind ``mark`` if it stands at ``at``; ``None`` if another text does. If the
        piece ends inside of it, that is carried over and the end of the piece returned."""
        if text.startswith(mark, at):
            return at + len(mark)
        if len(text) - at < len(mark) and mark.startswith(text[at:]):
            self.carry = text[at:]
            return len(text)
        return None

    def _call(self, text: str, at: int) -> int:
        reader = self._reader
        if reader is None:
            return self.give_up(at)
        at, deltas = reader.feed(text, at)
        self._out += deltas
        self._hand_on(reader)
        if reader.failed:
            self.lead.append(reader.rest)
            self.calls += reader.begun
            self._reader = None
            return self.give_up(at)
        if reader.done:
            self.calls += 1
            self._reader = None
            self.mode = self.after
        return at

    def _hand_on(self, reader: Reader) -> None:
        if reader.begun:
            self.lead.clear()
            self._prose.call()

    def _taken(self) -> list[Delta]:
        """What was found, with texts that follow each other as one."""
        found: list[Delta] = []
        for delta in self._out:
            last = found[-1] if found else None
            if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
                found[-1] = TextDelta(last.text + delta.text)
            else:
                found.append(delta)
        self._out.clear()
        return found
