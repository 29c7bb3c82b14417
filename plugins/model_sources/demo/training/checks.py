"""Judge an answer automatically."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ("passes",)


def _calls(text: str) -> list[dict[str, Any]]:
    calls = []
    for body in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.S):
        try:
            calls.append(json.loads(body))
        except json.JSONDecodeError:
            return []
    return calls


def _words(text: str, expected: str) -> bool:
    """Every word of ``expected`` occurs; with line breaks in it, every line occurs."""
    low = text.lower()
    parts = (
        expected.split("\n")
        if "\n" in expected
        else [expected]
        if expected in low
        else expected.split()
    )
    return all(p.lower() in low for p in parts)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def passes(check: str, expected: Any, text: str) -> bool:
    if check.startswith("thought_"):
        match = re.match(r"<think>\n(.+?)\n</think>\n\n(.*)", text, re.S)
        return bool(match) and passes(
            check.removeprefix("thought_"), expected, match[2] if match else ""
        )
    if "<think>" in text:
        return False
    if check == "words":
        return "<tool_call>" not in text and _words(text, expected)
    if check == "number":
        numbers = re.findall(r"-?\d+", text)
        return bool(numbers) and int(numbers[-1]) == expected
    if check == "call":
        name, arguments = expected
        return _calls(text) == [{"name": name, "arguments": arguments}]
    if check == "json":
        return bool(_json(text) == expected)
    if check == "english":
        return len(re.findall(r"[A-Za-z]{2,}", text)) >= expected and text.rstrip().endswith(
            (".", "!")
        )
    raise ValueError(f"unknown check {check!r}")
