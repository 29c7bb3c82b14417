"""What parsers have in common whose calls stand between tags of their own, in a block with tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.api.types import GrammarSpec, Tokenizer, Tool
from treadle_parsing_kit.incremental_json import BLANKS
from treadle_parsing_kit.tool_call_parser import ToolCallParser
from treadle_parsing_kit.tool_choice import (
    free_text_rules,
    names_one_tool,
    tag_rule,
    writable_tools,
)

__all__ = ("BlockFamilyParser",)


class BlockFamilyParser(ToolCallParser):
    """``wrappers`` open a block, ``begin`` a call in it or without one. ``closers`` are what may stand
    behind a call, in the order in which they come or without some."""

    head: tuple[str, ...] = ()
    """What stands before the arguments of a call."""
    call_opener = ""
    """The tag that a call begins with in a format whose blocks have none, if nothing else does."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Tool],
        *,
        wrappers: tuple[str, ...],
        begin: str,
        closers: tuple[str, ...],
    ) -> None:
        super().__init__()
        self._tokenizer, self._tools = tokenizer, tools
        self._wrappers, self._begin, self._closers = wrappers, begin, closers
        self.expect_openers(begin[0] + "".join(tag[0] for tag in wrappers))

    def read_call(self, text: str, pos: int) -> int:
        """Read behind ``begin``."""
        raise NotImplementedError

    def begin_call(self) -> None:
        """A call begins."""

    def read_text(self, text: str, pos: int) -> int:
        tag, end = self.find_tag(text, pos, *self._wrappers, self._begin)
        if tag:
            self._enter(tag)
        return end

    def _enter(self, tag: str) -> None:
        self.call_prefix.append(tag)
        if tag == self._begin:
            self.begin_call()
            self.mode = self.read_call
        else:
            self.mode = self._read_wrapped

    def _read_wrapped(self, text: str, pos: int) -> int:
        if text[pos] in BLANKS:
            self.call_prefix.append(text[pos])
            return pos + 1
        end = self.expect_tag(text, pos, self._begin)
        if end is None:
            return self.abandon_call(pos)
        if not self.pending:
            self._enter(self._begin)
        return end

    def restart(self, tag: str, end: int) -> int:
        """A call begins where the one before has not ended, which is none then."""
        self.abandon_call(end)
        self._enter(tag)
        return end

    def read_after_call(self, text: str, pos: int) -> int:
        if text[pos] in BLANKS:
            self.call_prefix.append(text[pos])
            return pos + 1
        partial = False
        for tag in self._closers:
            end = self.expect_tag(text, pos, tag)
            if end is not None and not self.pending:
                self.call_prefix.clear()
                return end
            partial = partial or end is not None
        return len(text) if partial else self.abandon_call(pos)

    def rule(self, pieces: Sequence[str]) -> str:
        """Return a Lark expression of a layout; each tag is a piece of its own."""
        return " ".join(tag_rule(piece, self._tokenizer) for piece in pieces)

    def name_in(self, header: str) -> str:
        """Return the name that a header gives a call, ``""`` if it is none."""
        raise NotImplementedError

    def writable_tools(self, choice: str | Mapping[str, Any]) -> list[Tool]:
        """Return the tools whose names are read back from what a grammar writes."""

        def can_write(tool: Tool) -> bool:
            head = "".join(self.head).replace("{name}", tool.name).replace("{index}", "0")
            return self.name_in(head.partition(self._begin)[2]) == tool.name

        return writable_tools(self._tools, choice, can_write)

    def layout_grammar(
        self,
        choice: str | Mapping[str, Any],
        layout: tuple[Sequence[str], Sequence[str], Sequence[str]],
        call: Any,
    ) -> GrammarSpec | None:
        """Return the grammar of forced calls. ``layout`` is what stands before, between and behind
        the calls; ``call(i, tool)`` yields the rules of a tool, of which the first is ``call_i``."""
        tools = self.writable_tools(choice)
        if not tools:
            return None
        if choice == "auto":
            return self._auto_grammar(tools, layout, call)
        before, between, behind = (self.rule(pieces) for pieces in layout)
        repeated = "" if names_one_tool(choice) else f" ({between} call)*"
        lines = [f"start: {before} call{repeated} {behind}"]
        lines.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}")
        for i, tool in enumerate(tools):
            lines += call(i, tool)
        return GrammarSpec("ebnf", "\n".join(lines))

    def _auto_grammar(self, tools: Sequence[Tool], layout: Any, call: Any) -> GrammarSpec | None:
        """Return the grammar of text with calls in it. ``None`` if calls begin as other text does."""
        opening, between, closing = layout
        tag = opening[0] if opening else self.call_opener
        if not tag:
            return None
        before, middle, behind = map(self.rule, (opening[1:], between, closing))
        lines = free_text_rules(tag, "block", self._tokenizer)
        lines.append(
            f"block: {before} call ({middle} call)* {behind}" if opening else "block: call"
        )
        lines.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}")
        for i, tool in enumerate(tools):
            rule, *others = call(i, tool)
            if not opening:  # the tag is a part of the text before the call
                head = f"call_{i}: "
                rule = head + rule.removeprefix(head + self.rule([tag]))
            lines += [rule, *others]
        return GrammarSpec("ebnf", "\n".join(lines))
