"""The pages of the documentation, taken apart into blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

__all__ = ("Block", "blocks", "pages")

BLOCK = re.compile(
    r"(?:^<!-- example: (?P<note>[^\n]+?) -->\n)?^```(?P<language>[\w-]+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``note`` is the comment before it: ``not run: REASON``, ``file: NAME``,
    ``output`` (of the block before), ``fails`` (a command), or ``error`` (its message)."""

    page: Path
    line: int
    language: str
    code: str
    note: str

    @property
    def skipped(self) -> bool:
        return self.note.startswith("not run: ")

    @property
    def file(self) -> str | None:
        name = self.note.removeprefix("file: ").partition(", ")[0]
        return name if self.note.startswith("file: ") else None

    @property
    def broken(self) -> bool:
        """Whether the file is a plugin that must fail the suite of its kind."""
        return self.note.endswith(", which fails its suite")

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block; a backslash joins lines, comments are dropped."""
        lines = self.code.replace("\\\n", " ").splitlines()
        commands = (re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in lines)
        return [command for command in commands if command]


def pages() -> list[Path]:
    """The README and the documentation, without records (decisions, notebook), files of the root
    and the pages of the plugin kinds, whose examples are templates that have tests of their own."""
    records = {"adr", "notebook", "project", "plugins"}
    markdown_files = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(p for p in markdown_files if p.parent.name not in records)]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, m.start("code")) + 1,
            m["language"],
            m["code"],
            m["note"] or "",
        )
        for m in BLOCK.finditer(text)
    ]
