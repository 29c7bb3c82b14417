"""Sampling parameters that a program may change after it has made them, as vLLM's."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import treadle
from treadle.errors import RequestError

__all__ = (
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "from_treadle",
    "to_treadle",
)


class RequestOutputKind(Enum):
    """What a streamed output holds."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final"


@dataclass
class StructuredOutputsParams:
    """What an output must match. ``json`` is a schema, its text, or a pydantic model.

    ``disable_fallback`` has no effect: no other backend is tried in place of one that is named.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        self.to_treadle()

    def to_treadle(self) -> treadle.StructuredOutputsParams:
        """Return the same in treadle's words."""
        schema = self.json
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        backend, _, written = (self.backend or "").partition(":")
        options = written.split(",")  # as vLLM 0.8 writes them
        return treadle.StructuredOutputsParams(
            json=schema,
            regex=self.regex,
            choice=None if self.choice is None else list(self.choice),
            grammar=self.grammar,
            json_object=self.json_object or None,
            whitespace_pattern=self.whitespace_pattern,
            structural_tag=self.structural_tag,
            disable_any_whitespace=self.disable_any_whitespace
            or "disable-any-whitespace" in options,
            disable_additional_properties=self.disable_additional_properties
            or "no-additional-properties" in options,
            backend=backend or None,
        )


GuidedDecodingParams = StructuredOutputsParams
"""The name in vLLM 0.8."""


@dataclass(kw_only=True)
class SamplingParams:
    """Raises ``RequestError`` if it is made with a wrong value; a later change is checked by ``generate``."""

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    guided_decoding: StructuredOutputsParams | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    logits_processors: list[Any] | None = None

    def __post_init__(self) -> None:
        to_treadle(self)

    def clone(self) -> SamplingParams:
        return copy.deepcopy(self)


RENAMED = ("best_of", "output_kind", "guided_decoding", "structured_outputs", "logits_processors")
SAME = tuple(f.name for f in fields(SamplingParams) if f.name not in RENAMED)


def to_treadle(params: SamplingParams) -> treadle.SamplingParams:
    """Return the parameters as treadle's. Raises ``RequestError`` for what it does not have."""
    if params.best_of not in (None, params.n):
        raise RequestError(
            f"best_of is {params.best_of} and n is {params.n}: not built yet; give n only",
            param="best_of",
        )
    if params.logits_processors:
        raise RequestError(
            "logits_processors of a request are functions in vLLM; use extra_args with the name of "
            "a logits processor plugin",
            param="logits_processors",
        )
    if params.guided_decoding is not None and params.structured_outputs is not None:
        raise RequestError(
            "give structured_outputs or guided_decoding, not both", param="guided_decoding"
        )
    constraint = params.structured_outputs or params.guided_decoding
    return treadle.SamplingParams(
        **{name: getattr(params, name) for name in SAME},
        output_kind=params.output_kind.value,
        structured_outputs=None if constraint is None else constraint.to_treadle(),
    )


def from_treadle(params: treadle.SamplingParams) -> SamplingParams:
    """Return parameters without a constraint, such as the model's defaults, as vLLM's."""
    return SamplingParams(**{name: getattr(params, name) for name in SAME})
