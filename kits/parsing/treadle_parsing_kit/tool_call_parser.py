"""The frame of a tool call parser: text around calls, and input that is not certain yet.

A piece of output may end anywhere. Whatever a parser reads is either returned as a delta or kept,
word for word, until it is certain what it is: a candidate that is not a call comes out as text, as
a whole, without the tags of the format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from treadle.api.parsers import Delta, TextDelta, ToolCallDelta
from treadle_parsing_kit.partial_match import TagFilter, find_tag

__all__ = ("TextAroundCalls", "ToolCallParser", "ToolCallReader")


class ToolCallReader(Protocol):
    """Reads one call. ``treadle_parsing_kit.json_calls.JsonToolCallReader`` is one.

    ``begun``: a delta of the call has been returned, which cannot be taken back. ``done``: the call
    is complete. ``failed``: the text is not a call, or breaks off inside one.
    """

    begun: bool
    done: bool
    failed: bool

    @property
    def rest(self) -> str:
        """What was read and is in no delta."""

    def feed(self, text: str, pos: int = 0) -> tuple[int, list[Delta]]:
        """Read on from ``text[pos]``. Return where reading stopped, and the deltas."""

    def finish(self) -> list[Delta]:
        """The output has ended. Return the last deltas; ``rest`` must come out as text."""


class TextAroundCalls:
    """The text outside calls.

    Whitespace alone between two calls, or between a call and an end of the output, belongs to the
    format and is dropped. Any other text comes out as it is.
    """

    __slots__ = ("_after_call", "_whitespace", "has_text")

    def __init__(self) -> None:
        self._whitespace: list[str] = []
        self.has_text = self._after_call = False

    def emit_text(self, text: str) -> list[Delta]:
        """Add text. Whitespace is kept until more text, a call or the end follows."""
        if not text:
            return []
        if self.has_text:
            return [TextDelta(text)]
        self._whitespace.append(text)
        if not text.strip():
            return []
        self.has_text = True
        text = "".join(self._whitespace)
        self._whitespace.clear()
        return [TextDelta(text)]

    def start_call(self) -> None:
        """Drop whitespace that a call follows."""
        self._whitespace.clear()
        self.has_text, self._after_call = False, True

    def finish(self) -> list[Delta]:
        """Return the whitespace of an output that has no call."""
        text = "".join(self._whitespace)
        self._whitespace.clear()
        return [TextDelta(text)] if text and not self._after_call else []


class ToolCallParser:
    """A state machine whose state is ``mode``: a method that reads from a position of the text and
    returns the position up to which it has read.

    A subclass implements ``read_text`` (outside calls) and ``read_after_call``. Tags and whitespace
    of the format are put into ``call_prefix``, where they wait until a call follows; without one
    they come out as text, which never has ``special_tags`` in it. ``pending`` is the end of a piece that may be the beginning of a tag.
    """

    special_tags: Sequence[str] = ()
    """See ``treadle.api.parsers.Tagged``."""

    def __init__(self) -> None:
        self.mode: Callable[[str, int], int] = self.read_text
        self.call_prefix: list[str] = []
        self.pending = ""
        self.calls = 0
        self._out: list[Delta] = []
        self._text_around = TextAroundCalls()
        self._tag_filter = TagFilter(self.special_tags)
        self._reader: ToolCallReader | None = None
        self._has_begun = False  # the reader, so that nothing before it is text any more
        self._is_plain: Callable[[str], object] | None = None

    def expect_openers(self, characters: str) -> None:
        """Nothing but text can begin in ``read_text`` without one of these characters, nor a special tag."""
        openers = {re.escape(text[0]) for text in (*characters, *self.special_tags)}
        self._is_plain = re.compile(f"[^{''.join(sorted(openers))}]+").fullmatch

    def read_text(self, text: str, pos: int) -> int:
        """Read text outside calls from ``text[pos]``. Return the position after what was read."""
        raise NotImplementedError

    def read_after_call(self, text: str, pos: int) -> int:
        """Read what follows a complete call. Return the position after what was read."""
        raise NotImplementedError

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        """Read the next piece of output and return the deltas that are certain."""
        if (
            self._text_around.has_text
            and self._is_plain is not None
            and self._is_plain(text)
            and not (self.pending or self._tag_filter.pending)
            and self.mode == self.read_text
        ):
            return [TextDelta(text)]
        if self.pending:
            text, self.pending = self.pending + text, ""
        pos, end = 0, len(text)
        reader = self._reader
        if reader is not None and self._has_begun:
            pos, self._out = reader.feed(text)
            if pos == end and not (reader.done or reader.failed):
                return self._pop_deltas() if self._out else []
            pos = self._leave_call(reader, pos)
        while pos < end:
            pos = self.mode(text, pos)
        return self._pop_deltas() if self._out else []

    def finish(self) -> list[Delta]:
        """The output has ended: return what was kept."""
        if self._reader is not None:
            self._out += self._reader.finish()
            self._drop_prefix(self._reader)
            self.emit_text("".join(self.call_prefix) + self._reader.rest)
        elif self.mode != self.read_after_call:  # after a call, the rest belongs to the format
            self.emit_text("".join(self.call_prefix) + self.pending)
        self._flush_text()
        self._out += self._text_around.finish()
        self.call_prefix.clear()
        self.pending, self._reader, self.mode = "", None, self.read_text
        return self._pop_deltas()

    def emit_text(self, text: str) -> None:
        """Add ``text`` to the deltas: it is not part of a call."""
        if text:
            self._out += self._text_around.emit_text(self._tag_filter.feed(text))

    def start_call(self, reader: ToolCallReader) -> None:
        """Let ``reader`` read from here; ``call_prefix`` belongs to the call that it may find."""
        self._flush_text()
        self._reader, self._has_begun = reader, False
        self.mode = self._read_call

    def emit_call(self, name: str, arguments: str) -> None:
        """Add a whole call to the deltas; ``call_prefix`` belonged to it."""
        self._flush_text()
        self._text_around.start_call()
        self._out.append(ToolCallDelta(self.calls, name, arguments))
        self.calls += 1
        self.call_prefix.clear()
        self.mode = self.read_after_call

    def abandon_call(self, pos: int) -> int:
        """Emit ``call_prefix`` as text and return to ``read_text`` at position ``pos``."""
        self.emit_text("".join(self.call_prefix))
        self.call_prefix.clear()
        self.mode = self.read_text
        return pos

    def recover(self, pos: int) -> int:
        """Go on at position ``pos``, behind a call that is broken: other calls may follow it."""
        return self.abandon_call(pos)

    def end_call(self, pos: int) -> int:
        """Return to ``read_text`` at position ``pos``, where the format of a call ends."""
        self.call_prefix.clear()
        self.mode = self.read_text
        return pos

    def find_tag(self, text: str, pos: int, *tags: str) -> tuple[str, int]:
        """Return the next of ``tags`` and the position after it; if there is none, ``""`` and the end
        of the text. Emits the text before the tag, and keeps in ``pending`` what may begin one."""
        before, tag, end = self.scan(text, pos, *tags)
        self.emit_text(before)
        return tag, end

    def scan(self, text: str, pos: int, *tags: str) -> tuple[str, str, int]:
        """Return the text before the next of ``tags``, and what ``find_tag`` returns."""
        start, tag = find_tag(text, pos, tags)
        if tag:
            return text[pos:start], tag, start + len(tag)
        self.pending = text[start:]
        return text[pos:start], "", len(text)

    def expect_tag(self, text: str, pos: int, tag: str) -> int | None:
        """Return the position after ``tag`` if it stands at ``pos``; ``None`` if other text does.

        If the piece ends inside the tag, keeps its beginning in ``pending`` and returns the end of
        the piece.
        """
        if text.startswith(tag, pos):
            return pos + len(tag)
        if len(text) - pos < len(tag) and tag.startswith(text[pos:]):
            self.pending = text[pos:]
            return len(text)
        return None

    def _read_call(self, text: str, pos: int) -> int:
        reader = self._reader
        if reader is None:
            return self.abandon_call(pos)
        pos, deltas = reader.feed(text, pos)
        self._out += deltas
        if not self._has_begun:
            self._drop_prefix(reader)
        return self._leave_call(reader, pos)

    def _leave_call(self, reader: ToolCallReader, pos: int) -> int:
        if reader.failed:
            self.call_prefix.append(reader.rest)
            self.calls += reader.begun
            self._reader = None
            return self.recover(pos)
        if reader.done:
            self.calls += 1
            self._reader = None
            self.mode = self.read_after_call
        return pos

    def _drop_prefix(self, reader: ToolCallReader) -> None:
        if reader.begun:
            self._has_begun = True
            self.call_prefix.clear()
            self._text_around.start_call()

    def _flush_text(self) -> None:
        self._out += self._text_around.emit_text(self._tag_filter.finish())

    def _pop_deltas(self) -> list[Delta]:
        """Return and clear the deltas; adjacent texts become one."""
        out, self._out = self._out, []
        if len(out) < 2:
            return out
        deltas: list[Delta] = []
        for delta in out:
            last = deltas[-1] if deltas else None
            if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
                deltas[-1] = TextDelta(last.text + delta.text)
            else:
                deltas.append(delta)
        return deltas
