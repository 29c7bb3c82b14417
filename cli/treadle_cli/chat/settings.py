"""The sampling parameters of a chat: what the model comes with, and what the user has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from treadle.api.sampling_params import BOUNDS, OPEN_BELOW, SamplingParams
from treadle.errors import RequestError

__all__ = ("NAMES", "Settings")

# One answer that streams as text: these have one value that makes sense, or none that is seen.
FIXED = frozenset(
    {"n", "output_kind", "detokenize", "logprobs", "prompt_logprobs", "priority", "cache_salt"}
)
NAMES = tuple(name for name in SamplingParams.__struct_fields__ if name not in FIXED)
COMMON = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop")
"""What ``/set`` always shows."""

ANNOTATIONS = get_type_hints(SamplingParams)


class Settings:
    """Sampling parameters by name. ``defaults`` is ``None`` if only a server has them."""

    def __init__(self, defaults: SamplingParams | None, changes: Mapping[str, Any]) -> None:
        self._defaults = defaults
        self.changes: dict[str, Any] = dict(changes)
        self.params()

    def params(self) -> SamplingParams:
        """All parameters. Raises ``RequestError`` if one is outside its bounds."""
        base = self._defaults or SamplingParams(max_tokens=None)
        return base.replace(**self.changes, n=1, output_kind="delta")

    def use_defaults(self, defaults: SamplingParams | None) -> None:
        """Take those of another model; what the user has changed stays."""
        self._defaults = defaults

    def set(self, name: str, text: str) -> str:
        """Change a parameter and return the line to show. ``default`` takes the change back.

        Raises ``RequestError`` for an unknown name and for a value that is not allowed.
        """
        name = name.replace("-", "_")
        if name not in NAMES:
            raise RequestError(f"there is no parameter {name!r}; there are {', '.join(NAMES)}")
        before = dict(self.changes)
        try:
            if text == "default":
                self.changes.pop(name, None)
            elif text:
                self.changes[name] = parse_value(name, text)
            self.params()
        except RequestError:
            self.changes = before
            raise
        return self.line(name)

    def replace(self, changes: Mapping[str, Any]) -> None:
        """Take over the changes of a saved chat. Raises ``RequestError`` and changes nothing then."""
        taken = {name: convert(name, value) for name, value in changes.items() if name in NAMES}
        before, self.changes = self.changes, taken
        try:
            self.params()
        except RequestError:
            self.changes = before
            raise

    def lines(self) -> list[str]:
        """The common parameters and every other one that was changed."""
        return [self.line(name) for name in NAMES if name in COMMON or name in self.changes]

    def line(self, name: str) -> str:
        if name in self.changes:
            return f"{name} {show(self.changes[name])}{bounds(name)}"
        if self._defaults is None:
            return f"{name} the server's default{bounds(name)}"
        return f"{name} {show(getattr(self._defaults, name))} (default){bounds(name)}"


def parse_value(name: str, text: str) -> Any:
    """JSON, or else text, as the type of the parameter. Raises ``RequestError``."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = text
    if name in ("stop", "bad_words"):  # 42 and null are texts that an answer may hold
        value = value if isinstance(value, list) else [value if isinstance(value, str) else text]
    return convert(name, value)


def convert(name: str, value: Any) -> Any:
    try:
        return msgspec.convert(value, ANNOTATIONS[name], strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"{name} is {value!r}: {error}{bounds(name)}") from error


def bounds(name: str) -> str:
    """`` [0 … 2]``, or ``""`` for what has none that a person would reach."""
    if name not in BOUNDS or abs(BOUNDS[name][1]) >= 2**31 - 1:
        return ""
    low, high = BOUNDS[name]
    return f" {'(' if name in OPEN_BELOW else '['}{low:g} … {high:g}]"


def show(value: Any) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()
