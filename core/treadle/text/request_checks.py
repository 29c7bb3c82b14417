"""Checks of a request against the model, before the engine accepts it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import msgspec

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import EngineInfo
from treadle.errors import ContextLengthError, RequestError
from treadle.processes.failure import printable

__all__ = ("check_json", "check_prompt", "check_request", "too_long", "with_schema_text")

MAX_JSON_DEPTH, MAX_JSON_VALUES = 64, 100_000


def check_request(request: EngineRequest, info: EngineInfo) -> None:
    """Refuse a request that the engine could not serve; every frontend and the core call this.

    Raises ``RequestError`` that names the parameter, or ``ContextLengthError``.
    """
    check_prompt(request.prompt_ids, info)
    params = request.params
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        _check_ids(name, list(ids or ()), info.vocab_size)
    for word in request.bad_words:
        _check_ids("bad_words", word, info.vocab_size)
    forbidden = {word[0] for word in request.bad_words if len(word) == 1}
    if params.min_tokens:
        forbidden.update(params.stop_token_ids or ())
        forbidden.update(() if params.ignore_eos else info.eos_token_ids)
    if params.allowed_token_ids is not None and forbidden.issuperset(params.allowed_token_ids):
        raise RequestError(
            "bad_words and min_tokens leave none of allowed_token_ids for the first token; allow "
            "another id",
            param="allowed_token_ids",
        )
    if params.extra_args is not None:
        check_json("extra_args", params.extra_args)
    if params.ignore_eos and params.max_tokens is None:
        raise RequestError("ignore_eos needs an explicit max_tokens", param="ignore_eos")


def check_prompt(prompt_ids: Sequence[int], info: EngineInfo) -> None:
    """Refuse an empty or too long prompt, and ids outside of the vocabulary."""
    if not prompt_ids:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    _check_ids("prompt", prompt_ids, info.vocab_size)
    if len(prompt_ids) >= info.max_model_len:
        raise too_long(f"the prompt has {len(prompt_ids)} tokens", info, "prompt")


def too_long(length: str, info: EngineInfo, param: str) -> ContextLengthError:
    """Return the error for a prompt beyond the context. ``length`` says how long it is.

    Clients that shorten and try again know it by the words of OpenAI's API.
    """
    return ContextLengthError(
        f"This model's maximum context length is {info.max_model_len} tokens. However, {length}, and "
        "the output needs at least one. Please reduce the length of the messages or of the prompt, or "
        "pass truncate_prompt_tokens.",
        param=param,
    )


def check_json(name: str, value: object) -> None:
    """Refuse a value that JSON or msgpack cannot carry, or that is out of bounds.

    Allowed are objects with text keys, arrays, text, finite numbers, booleans and null; integers of
    64 bits, ``MAX_JSON_DEPTH`` levels, ``MAX_JSON_VALUES`` values. Raises ``RequestError``.
    """
    stack, count = [(value, 1)], 0
    while stack:
        item, depth = stack.pop()
        count += 1
        if depth > MAX_JSON_DEPTH or count > MAX_JSON_VALUES:
            raise RequestError(
                f"{name} nests more than {MAX_JSON_DEPTH} levels or has more than "
                f"{MAX_JSON_VALUES} values",
                param=name,
            )
        if isinstance(item, Mapping):
            if not all(isinstance(key, str) for key in item):
                raise RequestError(f"{name} has a key that is not text", param=name)
            stack += [(text, depth) for text in item if not text.isascii()]
            stack += [(child, depth + 1) for child in item.values()]
        elif isinstance(item, (list, tuple)):
            stack += [(child, depth + 1) for child in item]
        elif isinstance(item, str):
            if not item.isascii() and printable(item) != item:
                raise RequestError(f"{name} holds text with a lone surrogate", param=name)
        elif isinstance(item, int):
            if not -(2**63) <= item < 2**64:
                raise RequestError(
                    f"{name} holds an integer that needs more than 64 bits", param=name
                )
        elif not (item is None or (isinstance(item, float) and math.isfinite(item))):
            raise RequestError(
                f"{name} holds {type(item).__name__} {str(item)[:40]}, which is not JSON",
                param=name,
            )


def with_schema_text(params: SamplingParams) -> SamplingParams:
    """Return ``params`` with schemas as texts, which cross processes unchanged.

    Raises ``RequestError`` if it cannot be written as JSON.
    """
    outputs = params.structured_outputs
    if outputs is None:
        return params
    fields = {"json": outputs.json, "structural_tag": outputs.structural_tag}
    try:
        texts = {
            name: json.dumps(value, ensure_ascii=False, allow_nan=False)
            for name, value in fields.items()
            if value is not None and not isinstance(value, str)
        }
        "".join(texts.values()).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"the schema of structured_outputs cannot be written as JSON: {error}",
            param="structured_outputs",
        ) from error
    if not texts:
        return params
    return msgspec.structs.replace(
        params, structured_outputs=msgspec.structs.replace(outputs, **texts)
    )


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        return
    if invalid := [i for i in ids if type(i) is not int]:
        raise RequestError(f"{name} holds {invalid[0]!r}, which is not a token id", param=name)
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        invalid_id = low if low < 0 else high
        raise RequestError(
            f"{name} holds token id {invalid_id}; the model's ids are 0 to {vocab_size - 1}",
            param=name,
        )
