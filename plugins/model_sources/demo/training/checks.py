"""Judge an answer automatically."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ("passes",)


def _calls(text: str) -> list[dict[str, Any]]:
    found = []
    for body in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.S):
        try:
            found.append(json.loads(body))
        except json.JSONDecodeError:
            return []
    return found


def _words(text: str, want: str) -> bool:
    """Every word of ``want`` occurs; with line breaks in it, every line occurs."""
    low = text.lower()
    parts = want.split("\n") if "\n" in want else [want] if want in low else want.split()
    return all(p.lower() in low for p in parts)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def passes(check: str, want: Any, text: str) -> bool:
    if check.startswith("thought_"):
        match = re.match(r"<think>\n(.+?)\n</think>\n\n(.*)", text, re.S)
        return bool(match) and passes(
            check.removeprefix("thought_"), want, match[2] if match else ""
        )
    if "<think>" in text:
        return False
    if check == "words":
        return "<tool_call>" not in text and _words(text, want)
    if check == "number":
        numbers = re.findall(r"-?\d+", text)
        return bool(numbers) and int(numbers[-1]) == want
    if check == "call":
        name, arguments = want
        return _calls(text) == [{"name": name, "arguments": arguments}]
    if check == "json":
        return bool(_json(text) == want)
    if check == "english":
        return len(re.findall(r"[A-Za-z]{2,}", text)) >= want and text.rstrip().endswith((".", "!"))
    raise ValueError(f"unknown check {check!r}")
