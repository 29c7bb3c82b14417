"""A file of prompts as the requests of a batch, and their answers as lines of JSON."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from treadle_server.batches.lines import InputLine, LineError, read_lines
from treadle_server.batches.runner import Parsed
from treadle_server.batches.wire import BatchLine, LineOutput

__all__ = ("AnswerPrinter", "PromptFile")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class PromptFile:
    """Prompts, one a line: text, or in a ``.jsonl`` file objects with ``prompt`` or ``messages``.

    ``defaults`` are fields of each request that its line does not set. The name of a request is the number
    of its line.
    """

    def __init__(self, path: Path, defaults: Mapping[str, Any], max_bytes: int) -> None:
        self._path, self._defaults, self._max_bytes = path, defaults, max_bytes
        self._is_json = path.suffix in (".jsonl", ".ndjson", ".json")

    async def lines(self) -> AsyncGenerator[Parsed, None]:
        """Yield each line that is not blank as a request. Raises ``OSError``."""
        async with aclosing(read_lines(self._path, self._max_bytes)) as lines:
            async for line in lines:
                try:
                    yield line, self._request(line)
                except LineError as error:
                    yield line, error

    def _request(self, line: InputLine) -> BatchLine:
        if line.data is None:
            raise LineError("line_too_long", f"it has more than {self._max_bytes} bytes")
        try:
            text = line.data.decode()
            body = msgspec.json.decode(text) if self._is_json else {"prompt": text}
        except UnicodeDecodeError as error:
            raise LineError("invalid_line", f"it is not valid UTF-8: {error.reason}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise LineError("invalid_line", f"it is not valid JSON: {error}") from None
        if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
            raise LineError("invalid_line", "write a JSON object with either prompt or messages")
        is_chat = "messages" in body
        defaults = chat_defaults(self._defaults) if is_chat else self._defaults
        return BatchLine(
            custom_id=str(line.number),
            method="POST",
            url=CHAT if is_chat else TEXT,
            body=msgspec.Raw(msgspec.json.encode({**defaults, **body})),
        )


class AnswerPrinter:
    """Prints each answer when it is there, one line of JSON for each output."""

    def has_id(self, custom_id: str) -> bool:
        return False

    def has_line(self, number: int) -> bool:
        return False

    async def write(self, output: LineOutput) -> None:
        for row in rows(output):
            sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        sys.stdout.flush()


def rows(output: LineOutput) -> list[dict[str, Any]]:
    """Return what is printed of the answer to one line: its choices, as the API has them."""
    if output.error is not None:
        return [{"line": output.error.line, "error": output.error.message}]
    body = {} if output.response is None else msgspec.to_builtins(output.response.body)
    line = int(output.custom_id or 0)
    if "error" in body:
        return [{"line": line, "error": body["error"]["message"]}]
    return [
        {"line": line, **{name: value for name, value in choice.items() if value is not None}}
        for choice in body["choices"]
    ]


def chat_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat that mean the same as those of a completion."""
    logprobs = defaults.get("logprobs")
    if logprobs is None:
        return dict(defaults)
    return {**defaults, "logprobs": True, "top_logprobs": logprobs}
