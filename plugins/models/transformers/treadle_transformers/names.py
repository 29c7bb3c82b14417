"""Checkpoint names, from what transformers says about how it reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from treadle_transformers.support import refusal

__all__ = ("expert_names", "ignored", "renamed")

USUAL = ("gate_proj", "up_proj", "down_proj")


def renamed(family: Any, config: Any) -> dict[str, str]:
    """``ModelSpec.weight_prefix_map`` for a class of models.

    Older checkpoints hold the decoder without the prefix of the whole model (``h.0…`` of GPT-2).
    Raises ``UnsupportedModelError`` for a checkpoint whose tensors transformers takes apart.
    """
    table: dict[str, str] = {}
    for change in _changes(family, config):
        if hasattr(change, "operations") and change.operations:
            if not all(".experts" in target for target in change.target_patterns):
                raise refusal(
                    family.__name__,
                    f"its checkpoints hold {', '.join(change.source_patterns)} in a form that only "
                    "transformers can read",
                )
            continue
        for theirs, ours in zip(change.source_patterns, change.target_patterns, strict=True):
            table.update(_plain(family, theirs, ours))
    home = f"{family.base_model_prefix}."
    tops = {"lm_head", *(getattr(family, "_tp_plan", None) or {})}
    table |= {name: name for name in (home, *(f"{top}." for top in sorted(tops)))}
    table[""] = home
    return table


def ignored(family: Any, config: Any) -> tuple[str, ...]:
    """``ModelSpec.ignored_weights`` for a class of models: the tensors that transformers drops.

    It drops only what no parameter takes, so patterns of layers that this model has are left out.
    """
    layers = getattr(config, "num_hidden_layers", 0)
    found = []
    for pattern in getattr(family, "_keys_to_ignore_on_load_unexpected", None) or ():
        glob = pattern.removeprefix("^").replace(".*", "*").replace("\\.", ".")
        index = re.search(r"layers\.(\d+)", glob)
        if re.search(r"[\\()|+?\[\]$^]", glob) or (index and int(index[1]) < layers):
            continue
        found += [f"{glob}*"] if glob.startswith("model.") else [f"{glob}*", f"*.{glob}*"]
    return tuple(found)


def expert_names(family: Any, config: Any) -> tuple[str, ...]:
    """The last components of one expert's gate, up and down matrices in a checkpoint."""
    found: dict[str, list[str]] = {}
    for change in _changes(family, config):
        for target in change.target_patterns:
            sources = [s.removesuffix(".weight").rpartition(".")[2] for s in change.source_patterns]
            found[target.rpartition(".")[2]] = sources
    gate_up, down = found.get("gate_up_proj", ()), found.get("down_proj", ())
    return (*gate_up, *down) if len(gate_up) == 2 and len(down) == 1 else USUAL


def _changes(family: Any, config: Any) -> Iterator[Any]:
    """What transformers changes when it loads this class, or any of this ``model_type``."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    changes: Any = get_checkpoint_conversion_mapping

    kind = getattr(config, "model_type", None)
    yield from changes(family.__name__) or (changes(kind) if kind else ()) or ()


def _plain(family: Any, theirs: str, ours: str) -> Mapping[str, str]:
    """A renaming without regular expressions: at the start of a name, or from a dot on."""
    first = theirs.startswith("^")
    text = theirs.removeprefix("^").replace("\\.", ".")
    if re.search(r"[\\()|+*?\[\]$^]", text):
        raise refusal(family.__name__, f"its checkpoints name tensors by the pattern {theirs!r}")
    ours = ours.replace("\\.", ".")
    if first or text.startswith("."):
        return {text: ours}
    return {f".{text}": f".{ours}"}
