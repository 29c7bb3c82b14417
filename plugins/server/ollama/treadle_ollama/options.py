"""``options``: each is served, says no more than its absence, is named as ignored, or is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from treadle.errors import RequestError

__all__ = ("to_sampling",)

SERVED: dict[str, tuple[str, Any]] = {
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "num_predict": ("max_tokens", int),
    "stop": ("stop", str | list[str]),
    "seed": ("seed", int),
    "repeat_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
}
"""The server's name of an option, and its type."""

MACHINE = frozenset(
    {
        "num_ctx",
        "num_keep",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "num_thread",
        "numa",
        "low_vram",
        "f16_kv",
        "use_mmap",
        "use_mlock",
        "logits_all",
        "draft_num_predict",
        "mirostat_tau",
        "mirostat_eta",
    }
)
"""Options of the machine that runs a model. They are the operator's, and no answer depends on them:
a prompt or an output for which the context has no room ends in an error or with ``length``."""

NEUTRAL: dict[str, tuple[Any, str]] = {
    "typical_p": (1.0, "use top_p or min_p"),
    "tfs_z": (1.0, "use top_p or min_p"),
    "mirostat": (0, "use temperature, top_p or min_p"),
    "penalize_newline": (True, "newlines are penalized like all tokens"),
    "rope_frequency_base": (0.0, "the operator sets it with --hf-overrides"),
    "rope_frequency_scale": (0.0, "the operator sets it with --hf-overrides"),
    "vocab_only": (False, "the whole model is loaded"),
    "embedding_only": (False, "the whole model is loaded"),
}
"""Options that are not served: the value that changes nothing, and what to do instead of another."""


def to_sampling(
    options: Mapping[str, Any] | None, *, strict: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a request of the server, and the names of ignored options.

    ``strict`` refuses unknown options. Raises ``RequestError``.
    """
    options = {name: value for name, value in (options or {}).items() if value is not None}
    fields: dict[str, Any] = {}
    ignored = []
    for name, value in options.items():
        if name in SERVED:
            target, kind = SERVED[name]
            fields[target] = to_kind(name, value, kind)
        elif name in NEUTRAL:
            refuse_unless_neutral(name, value)
        elif name in MACHINE:
            ignored.append(f"options.{name}")
        elif name != "repeat_last_n":
            if strict:
                known = ", ".join(sorted({*SERVED, *NEUTRAL, *MACHINE, "repeat_last_n"}))
                raise RequestError(
                    f"unknown option {name[:64]!r}; known options: {known}", param="options"
                )
            ignored.append(f"options.{name}")
    if "repeat_last_n" in options:
        apply_window(to_kind("repeat_last_n", options["repeat_last_n"], int), fields)
    if fields.get("max_tokens", 1) < 1:
        fields["max_tokens"] = -1  # as many as the context has room for
    if fields.get("seed", 0) < 0:
        del fields["seed"]  # a random one
    return fields, ignored


def to_kind(name: str, value: Any, kind: Any) -> Any:
    """Return the value of an option. Whole numbers may be written as floats: many clients do."""
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = str(error).replace("`", "").partition(" - at ")[0]
        raise RequestError(f"options.{name}: {problem}", param=f"options.{name}") from None


def refuse_unless_neutral(name: str, value: Any) -> None:
    neutral, advice = NEUTRAL[name]
    if value == neutral:
        return
    raise RequestError(
        f"options.{name} is {str(value)[:64]}; it is not served here: {advice}, or send "
        f"{msgspec.json.encode(neutral).decode()}",
        param=f"options.{name}",
    )


def apply_window(last_n: int, fields: dict[str, Any]) -> None:
    """Penalize repetitions of no token, or of all; other windows are refused.

    A window without a penalty says nothing.
    """
    if last_n == 0:
        fields["repetition_penalty"] = 1.0
    elif last_n != -1 and fields.get("repetition_penalty", 1.0) != 1.0:
        raise RequestError(
            f"options.repeat_last_n is {last_n}; repetitions of the whole prompt and output are "
            "penalized here: send -1, or leave it out",
            param="options.repeat_last_n",
        )
