"""Sampling parameters and their limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from treadle.api.output_types import constraint_of_type
from treadle.errors import RequestError

__all__ = ("BOUNDS", "THINKING_BUDGET", "SamplingParams", "StructuredOutputsParams")

OutputKind = Literal["cumulative", "delta", "final"]

# name -> (lowest, highest) allowed value; the documentation shows the same table.
BOUNDS: dict[str, tuple[float, float]] = {
    "n": (1, 128),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "seed": (-(2**63), 2**63 - 1),
    "truncate_prompt_tokens": (1, 2**31 - 1),
    "thinking_token_budget": (0, 2**63 - 1),
    "priority": (-(2**31), 2**31 - 1),
}
# Zero itself is outside these ranges.
OPEN_BELOW = frozenset({"top_p", "repetition_penalty"})
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 256
MAX_STOP_IDS, MAX_BIAS, MAX_BAD_WORDS = 64, 1024, 128
MAX_SALT_CHARS = 128
THINKING_BUDGET = "thinking_budget"
"""The logits processor that ends a thought, for ``thinking_token_budget``."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The constraint of a structured output. Exactly one of the first six fields is set."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    strict: bool = True
    """``False`` accepts a schema that no backend enforces as a whole; ``RequestOutput.unenforced`` says what
    the output need not obey."""
    backend: str | None = None
    reasoning: str | None = None
    """Reasoning parser of the reasoning that precedes the constrained output; ``""`` if it is a part of it."""
    may_open_reasoning: bool = True
    """Whether the model may begin that reasoning itself. If not, only the prompt can have begun it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of a request, with vLLM's names and defaults.

    ``temperature`` 0 is greedy. ``top_k`` -1 or 0 and ``top_p`` 1 are off. ``logprobs`` is the
    number of alternatives in addition to the sampled token. Presence and frequency penalties count
    generated tokens (OpenAI API), the repetition penalty prompt and generated tokens (CTRL paper).
    ``structured_outputs`` may be given as a type, such as a pydantic model (``constraint_of_type``).
    Raises ``RequestError`` if a value is outside ``BOUNDS`` or otherwise invalid.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: dict[str, Any] | None = None
    """Arguments of logits processors, by name."""
    thinking_token_budget: int | None = None
    """Tokens after which the reasoning of a chat is ended."""
    output_kind: OutputKind = "cumulative"

    def __post_init__(self) -> None:
        given: Any = self.structured_outputs
        if given is not None and not isinstance(given, StructuredOutputsParams):
            constraint = StructuredOutputsParams(**constraint_of_type(given))
            msgspec.structs.force_setattr(self, "structured_outputs", constraint)
        for name, (low, high) in BOUNDS.items():
            value, annotation = getattr(self, name), SamplingParams.__annotations__[name]
            if value is not None or "None" not in annotation:
                check_number(name, value, low, high, is_integer="int" in annotation)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; "
                "lower min_tokens or raise max_tokens",
                param="min_tokens",
            )
        self._check_stop()
        self._check_ids()
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_SALT_CHARS:
            raise RequestError(
                f"cache_salt has {len(self.cache_salt)} characters; 1 to {MAX_SALT_CHARS} are allowed",
                param="cache_salt",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with changed fields. Raises ``RequestError`` if it is invalid."""
        return msgspec.structs.replace(self, **changes)

    def _check_stop(self) -> None:
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise RequestError(
                f"stop must be text or a list of texts, not {self.stop!r}", param="stop"
            )
        strings = self.stop_strings
        check_count("stop", strings, MAX_STOP_STRINGS)
        check_texts("stop", strings, blank=True)  # a line feed is a common stop string
        if strings and not self.detokenize:
            raise RequestError("stop needs detokenize=True: it is matched in text", param="stop")

    def _check_ids(self) -> None:
        check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS)
        check_count("bad_words", self.bad_words, MAX_BAD_WORDS)
        check_count("logit_bias", self.logit_bias, MAX_BIAS)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                check_number(name, token, 0, 2**31 - 1, is_integer=True)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty; no token could be sampled", param="allowed_token_ids"
            )
        for token, bias in (self.logit_bias or {}).items():
            check_number("logit_bias", token, 0, 2**31 - 1, is_integer=True)
            check_number("logit_bias", bias, -100.0, 100.0)
        check_texts("bad_words", self.bad_words or (), blank=False)


def check_number(
    name: str, value: Any, low: float, high: float, *, is_integer: bool = False
) -> None:
    """Raise ``RequestError`` unless ``value`` is finite, in range and, if ``is_integer``, an int."""
    kind = int if is_integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        expected = "a whole number" if is_integer else "a number"
        raise RequestError(f"{name} is {value!r}; it must be {expected}", param=name)
    is_above_low = value > low if name in OPEN_BELOW else value >= low
    if not (math.isfinite(value) and is_above_low and value <= high):
        bracket = "(" if name in OPEN_BELOW else "["
        raise RequestError(f"{name} is {value}; it must be in {bracket}{low}, {high}]", param=name)


def check_count(name: str, values: Sequence[Any] | dict[Any, Any] | None, limit: int) -> None:
    if values is not None and len(values) > limit:
        raise RequestError(
            f"{name} has {len(values)} entries; at most {limit} are allowed", param=name
        )


def check_texts(name: str, values: Sequence[Any], *, blank: bool) -> None:
    """Raise ``RequestError`` for an empty text, or one of only whitespace unless ``blank``."""
    for text in values:
        if not isinstance(text, str) or not (text if blank else text.strip()):
            raise RequestError(f"{name} has {text!r}; entries must be non-empty texts", param=name)
        if len(text) > MAX_STOP_CHARS:
            raise RequestError(
                f"{name} has {len(text)} characters; at most {MAX_STOP_CHARS} are allowed",
                param=name,
            )
