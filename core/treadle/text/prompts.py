"""The forms in which a prompt may be given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import msgspec

from treadle.errors import RequestError

__all__ = (
    "Prompt",
    "PromptInput",
    "TextPrompt",
    "TokensPrompt",
    "parse_prompt",
    "parse_prompts",
    "prompt_at",
)


class TextPrompt(TypedDict):
    """``{"prompt": "text"}``"""

    prompt: str


class TokensPrompt(TypedDict, total=False):
    """``{"prompt_token_ids": [1, 2]}``, perhaps with the text that they came from."""

    prompt_token_ids: list[int]
    prompt: str


PromptInput = str | Sequence[int] | TextPrompt | TokensPrompt

ALLOWED = ("prompt", "prompt_token_ids")
TEXT_TYPES = (str, bytes, bytearray, memoryview)  # sequences, but not of prompts or ids


class Prompt(msgspec.Struct, frozen=True):
    """One prompt. With ``ids``, ``text`` is only shown; without, it is encoded, with the tokens that
    the tokenizer puts around a text unless ``add_special_tokens`` is false. ``client`` is whose it
    is: each gets a fair share of the threads that encode, and of those that compile grammars."""

    text: str | None = None
    ids: list[int] | None = None
    add_special_tokens: bool = True
    client: str = ""


def parse_prompt(prompt: Any, param: str = "prompt") -> Prompt:
    """Raises ``RequestError`` that names ``param`` for anything but one prompt."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt, param)
    if isinstance(prompt, Sequence) and not isinstance(prompt, TEXT_TYPES):
        return Prompt(ids=_ids(prompt, param))
    raise RequestError(
        f"{param} is {type(prompt).__name__}; a prompt is text, a list of token ids, "
        '{"prompt": text} or {"prompt_token_ids": ids}',
        param=param,
    )


def parse_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or a list of prompts; a list of ids is one prompt."""
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, TEXT_TYPES)
    if not is_list or (prompts and isinstance(prompts[0], int)):
        return [parse_prompt(prompts)]
    return [parse_prompt(item, f"prompt[{i}]") for i, item in enumerate(prompts)]


def _from_mapping(fields: Mapping[str, Any], param: str) -> Prompt:
    if unknown := [key for key in fields if key not in ALLOWED]:
        raise RequestError(
            f"{param} has the key {unknown[0]!r}; known keys: {', '.join(ALLOWED)}", param=param
        )
    text, ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise RequestError(
            f"{param}['prompt'] is {type(text).__name__}; it must be text", param=param
        )
    if ids is None and text is None:
        raise RequestError(f"{param} has neither prompt nor prompt_token_ids", param=param)
    return Prompt(text=text, ids=None if ids is None else _ids(ids, param))


def _ids(values: Any, param: str) -> list[int]:
    """A list of ids. Their range is the engine's business; their type is ours."""
    if not isinstance(values, Sequence) or isinstance(values, TEXT_TYPES):
        raise RequestError(
            f"{param}: token ids are {type(values).__name__}; they must be a list of whole numbers",
            param=param,
        )
    ids = list(values)
    if invalid := [i for i in ids if type(i) is not int]:
        raise RequestError(f"{param} holds {invalid[0]!r}, which is not a token id", param=param)
    return ids


@contextmanager
def prompt_at(index: int, count: int) -> Iterator[None]:
    """Add the index to an error about one of several prompts."""
    try:
        yield
    except RequestError as error:
        if count > 1 and error.param == "prompt":
            error.param = f"prompt[{index}]"
            error.args = (f"{error} ({error.param})",)
        raise
