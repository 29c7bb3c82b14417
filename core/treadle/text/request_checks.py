"""Checks of a request against the model, before the engine accepts it."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import MAX_SALT_CHARS, SamplingParams
from treadle.api.step_types import EngineInfo
from treadle.errors import ContextLengthError, RequestError

__all__ = ("check_prompt", "check_request")


def check_request(request: EngineRequest, info: EngineInfo) -> None:
    """Refuse a request that the engine could not serve; every frontend and the core call this.

    Raises ``RequestError`` that names the parameter, or ``ContextLengthError``.
    """
    check_prompt(request.prompt_ids, info)
    params = request.params
    _check_types(params)
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        _check_ids(name, list(ids or ()), info.vocab_size)
    for word in request.bad_words:
        _check_ids("bad_words", word, info.vocab_size)
    if params.ignore_eos and params.max_tokens is None:
        raise RequestError("ignore_eos needs an explicit max_tokens", param="ignore_eos")


def check_prompt(prompt_ids: Sequence[int], info: EngineInfo) -> None:
    """Refuse an empty or too long prompt, and ids outside of the vocabulary."""
    if not prompt_ids:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    _check_ids("prompt", prompt_ids, info.vocab_size)
    if len(prompt_ids) >= info.max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens; with at least one output token the context "
            f"of {info.max_model_len} tokens allows {info.max_model_len - 1}: shorten the prompt "
            "or pass truncate_prompt_tokens",
            param="prompt",
        )


def _check_types(params: SamplingParams) -> None:
    if params.cache_salt is not None and not 0 < len(params.cache_salt) <= MAX_SALT_CHARS:
        raise RequestError(
            f"cache_salt has {len(params.cache_salt)} characters; 1 to {MAX_SALT_CHARS} are allowed",
            param="cache_salt",
        )


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        return
    try:
        low, high = min(ids), max(ids)
    except TypeError:
        low, high = -1, -1
    if any(type(i) is not int for i in ids):
        bad = next(i for i in ids if type(i) is not int)
        raise RequestError(f"{name} holds {bad!r}, which is not a token id", param=name)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(
            f"{name} holds token id {bad}; the model's ids are 0 to {vocab_size - 1}", param=name
        )
