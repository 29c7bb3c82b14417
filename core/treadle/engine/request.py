"""A sequence while the engine works on it, and the one place where requests are checked."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from treadle.engine.messages import EngineRequest
from treadle.engine.plan import EngineFacts, TokenLogprobs
from treadle.errors import ContextLengthError, RequestError
from treadle.sampling.params import MAX_SALT_CHARS, SamplingParams

if TYPE_CHECKING:
    from treadle.guided import Guide

__all__ = ("Sequence", "check_request")


class Sequence:
    """One sequence's state in the scheduler, from admission to queue until it is finished.

    ``tokens`` are the ids that the host knows, prompt first. ``computed`` counts the tokens whose
    keys and values are in the cache once every launched step has run, ``pending`` the tokens that
    launched steps will sample and that are not in ``tokens`` yet. ``held`` tells that the host must see each of its
    tokens before the next is sampled.
    """

    __slots__ = (
        "arrival",
        "cached_tokens",
        "chain",
        "computed",
        "epoch",
        "finished",
        "guide",
        "held",
        "id",
        "last_on_device",
        "leader",
        "max_len",
        "named",
        "order",
        "params",
        "pending",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "request",
        "root",
        "seed",
        "slot",
        "stop_ids",
        "tables",
        "tokens",
    )

    def __init__(self, request: EngineRequest, facts: EngineFacts, root: bytes, seed: int) -> None:
        params = request.params
        self.id = request.id
        self.request = request
        self.params = params
        self.arrival = request.arrival
        self.priority = params.priority
        self.leader = request.leader
        self.tokens = list(request.prompt_ids)
        self.prompt_len = len(self.tokens)
        room = facts.max_model_len - self.prompt_len
        wanted = room if params.max_tokens is None else params.max_tokens
        self.max_len = self.prompt_len + min(wanted, room)
        stops = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops.update(facts.eos_ids)
        self.stop_ids = frozenset(stops)
        self.seed = seed
        self.slot = -1
        self.tables: list[list[int]] = [[] for _ in facts.groups]
        self.chain: list[bytes] = []
        self.root = root
        self.named = 0
        self.computed = 0
        self.pending = 0
        self.epoch = 0
        self.last_on_device = False
        self.cached_tokens = 0
        self.finished = False
        self.guide: Guide | None = None
        self.held = False
        self.order: tuple[float, ...] = ()
        self.prompt_logprobs: list[TokenLogprobs] | None = (
            [] if params.prompt_logprobs is not None else None
        )

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def total(self) -> int:
        """Tokens of the sequence once every launched step has run."""
        return len(self.tokens) + self.pending

    @property
    def running(self) -> bool:
        return self.slot >= 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id!r}, {self.prompt_len}+{self.output_len} tokens, "
            f"{self.computed} computed, slot {self.slot})"
        )


def check_request(request: EngineRequest, facts: EngineFacts) -> None:
    """Refuse a request that the engine could not serve; every frontend and the core call this.

    Raises ``RequestError`` that names the parameter, or ``ContextLengthError``.
    """
    check_prompt(request.prompt_ids, facts)
    params = request.params
    _check_types(params)
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        _check_ids(name, list(ids or ()), facts.vocab_size)
    for word in request.bad_words:
        _check_ids("bad_words", word, facts.vocab_size)
    if params.ignore_eos and params.max_tokens is None:
        raise RequestError("ignore_eos needs an explicit max_tokens", param="ignore_eos")


def check_prompt(prompt_ids: Seq[int], facts: EngineFacts) -> None:
    """Refuse an empty or too long prompt, and ids outside of the vocabulary."""
    if not prompt_ids:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    _check_ids("prompt", prompt_ids, facts.vocab_size)
    if len(prompt_ids) >= facts.max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens; with at least one output token the context "
            f"of {facts.max_model_len} tokens allows {facts.max_model_len - 1}: shorten the prompt "
            "or pass truncate_prompt_tokens",
            param="prompt",
        )


def _check_types(params: SamplingParams) -> None:
    if params.cache_salt is not None and not 0 < len(params.cache_salt) <= MAX_SALT_CHARS:
        raise RequestError(
            f"cache_salt has {len(params.cache_salt)} characters; 1 to {MAX_SALT_CHARS} are allowed",
            param="cache_salt",
        )


def _check_ids(name: str, ids: Seq[int], vocab_size: int) -> None:
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
