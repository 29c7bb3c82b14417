"""An answer on the screen while it is written: wrapped, reasoning dim or folded, tool calls shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from treadle.outputs import OutputPart, ReasoningPart, TextPart, ToolCall
from treadle_cli.chat.models import Update
from treadle_cli.terminal import Answer, Interrupt, Screen, Spinner
from treadle_cli.terminal.screen import columns, visible
from treadle_cli.terminal.wrapping import Wrapper

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ("AnswerDisplay", "Reasoning", "Reply", "follow")

Reasoning = Literal["show", "fold", "hide"]

DIM, CYAN, RESET = "\x1b[2m", "\x1b[36m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered; ``figures`` count and time it."""

    content: str
    reasoning: str
    calls: list[ToolCall]
    figures: Answer


class AnswerDisplay:
    """Writes the parts of one answer. Reasoning and tool calls set off the text around them."""

    def __init__(self, screen: Screen, reasoning: Reasoning) -> None:
        self._screen, self._reasoning = screen, reasoning
        self._spinner = Spinner(screen)
        self._wrapper = Wrapper(lambda: columns(screen.out))
        self._section: type[OutputPart] | None = None
        self._has_text = False
        """Whether the section has shown something; blank lines before that are left out."""
        self._call: int | None = None
        self._thought_at = 0.0
        self._num_thoughts = 0
        self._was_folded = False

    def start(self) -> None:
        self._spinner.start(lambda: "waiting")

    def part(self, part: OutputPart) -> None:
        """Show one part."""
        if isinstance(part, ReasoningPart) and self._reasoning != "show":
            return self._fold()
        if type(part) is not self._section:
            if isinstance(part, TextPart) and self._section is None and not part.text.strip("\n"):
                return  # the model begins with blank lines
            self._enter(type(part))
        if isinstance(part, ToolCall):
            return self._tool_call(part)
        text = part.text if self._has_text else part.text.lstrip("\n")
        if text:
            self._has_text = True
            self._write(text)

    def end(self) -> None:
        """Finish the last line. Safe to call twice."""
        self._spinner.stop()
        self._leave()
        self._section = None
        if not self._wrapper.is_at_start:
            self._write("\n")

    def _fold(self) -> None:
        if not self._num_thoughts:
            self._spinner.stop()
            self._thought_at = time.monotonic()
        self._num_thoughts += 1
        self._spinner.start(lambda: "thinking" if self._reasoning == "fold" else "waiting")

    def _enter(self, section: type[OutputPart]) -> None:
        self._spinner.stop()
        if self._num_thoughts and not self._was_folded and self._reasoning == "fold":
            self._was_folded = True
            seconds = time.monotonic() - self._thought_at
            self._screen.note(f"(thought for {seconds:.1f} s; /reasoning show unfolds)")
        if self._section is not None:
            self._leave()
            self._write("\n" if self._wrapper.is_at_start else "\n\n")
        self._section, self._has_text, self._call = section, False, None
        if section is ReasoningPart:
            self._style(DIM)
        elif section is ToolCall:
            self._style(CYAN)

    def _leave(self) -> None:
        if self._call is not None:
            self._write(")")
            self._call = None
        if self._section in (ReasoningPart, ToolCall):
            self._style(RESET)

    def _tool_call(self, piece: ToolCall) -> None:
        if piece.index != self._call:
            if self._call is not None:
                self._write(")\n")
            self._call = piece.index
            self._write(f"→ {piece.name or 'function'}(")
        self._write(piece.arguments)

    def _write(self, text: str) -> None:
        if self._screen.animated:
            self._screen.raw(self._wrapper.feed(visible(text)))
        else:
            self._wrapper.feed(text)  # counts columns only
            self._screen.text(text)

    def _style(self, sequence: str) -> None:
        if self._screen.animated:
            self._screen.raw(sequence)


def follow(updates: Iterator[Update], screen: Screen, reasoning: Reasoning) -> Reply:
    """Show an answer while it is written; Ctrl-C ends it and keeps what is there."""
    stream = cast("Generator[Update, None, None]", updates)
    display, parts = AnswerDisplay(screen, reasoning), PartCollector()
    tokens, start_time = 0, time.perf_counter()
    last: dict[str, Any] = {"ttft": None, "reason": None, "error": None}
    with Interrupt() as interrupt, closing(stream):
        display.start()
        try:
            for update in stream:
                tokens += update.num_tokens
                if update.num_tokens and last["ttft"] is None:
                    last["ttft"] = time.perf_counter() - start_time
                last["reason"] = update.finish_reason or last["reason"]
                last["error"] = update.error or last["error"]
                tokens = update.total_tokens or tokens
                for part in update.parts:
                    parts.add(part)
                    display.part(part)
                if interrupt.is_interrupted:
                    break
        finally:
            display.end()
        stopped = interrupt.is_interrupted and last["reason"] is None
    seconds = time.perf_counter() - start_time
    figures = Answer(parts.content, tokens, seconds, stopped=stopped, **last)
    return Reply(parts.content, parts.reasoning, parts.calls(), figures)


class PartCollector:
    """Puts the pieces of an answer together."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, ToolCall] = {}

    @property
    def content(self) -> str:
        text = "".join(self._texts)
        return text.lstrip("\n") if self._thoughts else text

    @property
    def reasoning(self) -> str:
        return "".join(self._thoughts)

    def add(self, part: OutputPart) -> None:
        if isinstance(part, TextPart):
            self._texts.append(part.text)
        elif isinstance(part, ReasoningPart):
            self._thoughts.append(part.text)
        else:
            known = self._calls.get(part.index, ToolCall(index=part.index))
            self._calls[part.index] = ToolCall(
                index=part.index,
                id=known.id or part.id,
                name=known.name or part.name,
                arguments=known.arguments + part.arguments,
            )

    def calls(self) -> list[ToolCall]:
        """The calls, each with an id: servers that give none get one that fits their call."""
        return [
            ToolCall(
                index=i, id=c.id or f"call_{i}", name=c.name or "function", arguments=c.arguments
            )
            for i, c in sorted(self._calls.items())
        ]
