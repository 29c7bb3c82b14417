"""From the fields of a request to ``SamplingParams``. The bounds are checked there, not here."""

from __future__ import annotations

from typing import Any

from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.errors import RequestError
from treadle_server.wire.common import ResponseFormat, SamplingFields, StructuredOutputs

__all__ = ("MAX_SEQUENCES", "constraint_of", "to_params")

MAX_SEQUENCES = 256
"""Most sequences of one request: prompts times ``n``."""

# Fields that are passed on under their own name when the client gave them.
PASSED = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "priority",
    "thinking_token_budget",
    "cache_salt",
    "extra_args",
)
UNLIMITED = -1
"""The ``max_tokens`` of clients that want as many as there is room for."""
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
BACKEND_OPTIONS = ("no-fallback", "disable-any-whitespace", "no-additional-properties")
SPELLINGS = {
    "json": ("guided_json", "json_schema"),
    "regex": ("guided_regex", "regex"),
    "choice": ("guided_choice",),
    "grammar": ("guided_grammar", "ebnf"),
}
"""Fields of a request that mean the same as those of ``structured_outputs``."""


def to_params(
    fields: SamplingFields, defaults: SamplingParams, context_len: int, **changes: Any
) -> SamplingParams:
    """Return the parameters of a request: the model's defaults, the client's fields, then ``changes``.

    ``max_tokens`` is shortened to what the prompt leaves of the context, which has ``context_len``
    tokens. Raises ``RequestError`` naming the parameter at fault.
    """
    values = {name: value for name in PASSED if (value := getattr(fields, name)) is not None}
    values["output_kind"] = "delta" if fields.stream else "final"
    if structured_outputs := to_structured_outputs(fields):
        values["structured_outputs"] = structured_outputs
    values.update(changes)
    if values.get("max_tokens") == UNLIMITED:
        values["max_tokens"] = None
    if fields.stop is not None:
        texts = [fields.stop] if isinstance(fields.stop, str) else fields.stop
        values["stop"] = [text for text in texts if text] or None
    check(fields, values)
    if values.get("max_tokens") is not None:
        values["max_tokens"] = min(values["max_tokens"], context_len)
    return defaults.replace(**values)


def check(fields: SamplingFields, values: dict[str, Any]) -> None:
    """Check combinations of fields that only the API has."""
    num_outputs = values.get("n", 1)
    if fields.best_of is not None and fields.best_of != num_outputs:
        raise RequestError(
            f"best_of is {fields.best_of}; only a completion that is not streamed can choose among "
            f"more outputs than n, which is {num_outputs}: leave it out, or choose yourself",
            param="best_of",
        )
    if fields.stream_options is not None and not fields.stream:
        raise RequestError(
            "stream_options is given but stream is not true; set stream or leave it out",
            param="stream_options",
        )
    if fields.ignore_eos and values.get("max_tokens") is None:
        raise RequestError(
            "ignore_eos needs an explicit max_tokens, else every output would fill the context",
            param="ignore_eos",
        )
    if fields.cache_salt is not None and not fields.cache_salt.isprintable():
        raise RequestError("cache_salt must be printable text", param="cache_salt")


def to_structured_outputs(fields: SamplingFields) -> StructuredOutputsParams | None:
    """Return the constraint of the output, from any of its spellings."""
    outputs = fields.structured_outputs or StructuredOutputs()
    pattern = outputs.whitespace_pattern
    if pattern is None:
        pattern = fields.guided_whitespace_pattern
    constraints = [*of_format(fields.response_format)]
    for name in FORMS:
        given = [getattr(fields, spelling, None) for spelling in SPELLINGS.get(name, ())]
        constraints += [
            (name, value)
            for value in (*given, getattr(outputs, name))
            if value is not None and value is not False
        ]
    if not constraints:
        if fields.structured_outputs is not None or pattern is not None:
            name = "guided_whitespace_pattern" if pattern is not None else "structured_outputs"
            raise RequestError(
                f"{name} is given without a constraint; give one of {', '.join(FORMS)}", param=name
            )
        return None
    if len(constraints) > 1:
        names = " and ".join(name for name, _ in constraints)
        raise RequestError(
            f"the output is constrained by {names}; give one constraint", param="structured_outputs"
        )
    schema = fields.response_format and fields.response_format.json_schema
    backend, options = of_backend(outputs.backend or fields.guided_decoding_backend)
    return StructuredOutputsParams(
        **dict(constraints),
        whitespace_pattern=pattern,
        disable_any_whitespace=bool(outputs.disable_any_whitespace)
        or "disable-any-whitespace" in options,
        disable_additional_properties=bool(outputs.disable_additional_properties)
        or "no-additional-properties" in options,
        strict=outputs.strict is not False and not (schema and schema.strict is False),
        backend=backend,
    )


def of_backend(name: str | None) -> tuple[str | None, list[str]]:
    """Return a backend and the options that vLLM 0.8 writes behind it: ``guidance:no-fallback,…``."""
    key, _, written = (name or "").partition(":")
    options = [option.strip() for option in written.split(",") if option.strip()]
    if unknown := [option for option in options if option not in BACKEND_OPTIONS]:
        raise RequestError(
            f"guided_decoding_backend is {name!r:.80}: {unknown[0]!r:.40} is no option of a backend; those are "
            f"{', '.join(BACKEND_OPTIONS)}",
            param="guided_decoding_backend",
        )
    return key or None, options


def constraint_of(fields: SamplingFields) -> str:
    """Return the name of the field with the constraint of the output, in the client's spelling.

    Empty if several do, or none.
    """
    if getattr(fields, "tool_choice", None) not in (None, "none", "auto"):
        return "tools"
    names = [name for names in SPELLINGS.values() for name in names if getattr(fields, name, None)]
    if fields.response_format is not None and fields.response_format.type != "text":
        names.append("response_format")
    if fields.structured_outputs is not None:
        names.append("structured_outputs")
    return names[0] if len(names) == 1 else ""


def of_format(form: ResponseFormat | None) -> list[tuple[str, Any]]:
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [("json_object", True)]
    if form.type == "structural_tag":
        parts = {"format": form.format, "structures": form.structures, "triggers": form.triggers}
        given = {name: value for name, value in parts.items() if value is not None}
        return [("structural_tag", {"type": form.type, **given})]
    if form.json_schema is None or form.json_schema.schema is None:
        raise RequestError(
            "response_format of type json_schema needs json_schema.schema",
            param="response_format.json_schema",
        )
    return [("json", form.json_schema.schema)]
