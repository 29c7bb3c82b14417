"""The tables of what treadle answers to names of other engines, from ``core/treadle/option_names.toml``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from treadle.option_names import ENVIRONMENT, OptionName, option_names

__all__ = ("BLOCKS",)

SGLANG = "sglang"


def vllm_flags() -> str:
    """What each option of vLLM is here, by section."""
    return _sections([s for s in option_names() if s not in (ENVIRONMENT, SGLANG)])


def sglang_options() -> str:
    """The options of SGLang that have another name here."""
    from documents import table

    rows = option_names()[SGLANG].items()
    return table(("Accepted", "In treadle"), [(f"`{n}`", _answer(n, row)) for n, row in rows])


def vllm_variables() -> str:
    """What each environment variable of vLLM is here."""
    from documents import table

    rows = groupby(option_names()[ENVIRONMENT].items(), key=lambda item: item[1])
    return table(
        ("vLLM", "Here"),
        (
            (", ".join(f"`{name}`" for name, _ in group), row.refusal or f"no effect: {row.excuse}")
            for row, group in rows
        ),
    )


def _sections(names: list[str]) -> str:
    from documents import table

    parts = []
    for section in names:
        rows = groupby(
            option_names()[section].items(),
            key=lambda item: item[1].refusal or item[1].excuse or item[0],
        )
        cells = []
        for _, group in rows:
            members = list(group)
            names_of_rows = ", ".join(f"`{name}`{_only(row)}" for name, row in members)
            cells.append((names_of_rows, _answer(*members[0])))
        parts.append(f"### {section.capitalize()}\n\n" + table(("vLLM", "Here"), cells))
    return "\n".join(parts)


def _only(row: OptionName) -> str:
    return f" ({row.version})" if row.version else ""


def _answer(name: str, row: OptionName) -> str:
    if row.refusal:
        return row.refusal
    if row.excuse:
        return row.excuse if row.always else f"no effect: {row.excuse}"
    values = [f"`{theirs}` is `{ours}`" for theirs, ours in row.values.items() if ours]
    notes = [note for note in (", ".join(values), row.note) if note]
    equivalent = f"`{row.ours}`" if row.ours else "the same"
    return "; ".join([equivalent, *notes])


BLOCKS: dict[str, Callable[[], str]] = {
    block.__name__: block for block in (vllm_flags, vllm_variables, sglang_options)
}
