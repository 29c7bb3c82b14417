"""Errors as Ollama's clients read them: one text, with the names of their own fields."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from treadle_server.surfaces import APIError

__all__ = ("RESPONSES_TEXT", "OllamaError", "error_form")

RESPONSES_TEXT = {
    400: "The request is wrong; the text says what is",
    404: "There is no such model",
    429: "The queue is full; try again later",
    500: "The request failed; others are not affected",
    503: "The server cannot answer now",
    504: "The request took longer than the server allows",
}
FIELDS = {
    "repetition_penalty": "options.repeat_penalty",
    "presence_penalty": "options.presence_penalty",
    "frequency_penalty": "options.frequency_penalty",
    "max_tokens": "options.num_predict",
    "temperature": "options.temperature",
    "top_k": "options.top_k",
    "top_p": "options.top_p",
    "min_p": "options.min_p",
    "seed": "options.seed",
    "stop": "options.stop",
    "structured_outputs": "format",
    "response_format": "format",
    "reasoning_effort": "think",
}
"""The client's name of a field that the error has under the server's name."""


class OllamaError(msgspec.Struct):
    error: Annotated[str, Meta(description="What went wrong.")]


def error_form(error: APIError, request_id: str) -> OllamaError:
    message, param = error.detail.message, error.detail.param or ""
    if (name := FIELDS.get(param)) is not None and name not in message:
        message = message.replace(param, name, 1)
    return OllamaError(message)
