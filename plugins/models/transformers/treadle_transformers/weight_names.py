"""Checkpoint names, from what transformers says about how it reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from treadle_transformers.support import refusal

__all__ = ("expert_names", "ignored", "renamed")

DEFAULT_NAMES = ("gate_proj", "up_proj", "down_proj")


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
        for source_pattern, target_pattern in zip(
            change.source_patterns, change.target_patterns, strict=True
        ):
            table.update(_plain(family, source_pattern, target_pattern))
    base_prefix = f"{family.base_model_prefix}."
    heads = {"lm_head", *(getattr(family, "_tp_plan", None) or {})}
    table |= {name: name for name in (base_prefix, *(f"{head}." for head in sorted(heads)))}
    table[""] = base_prefix
    return table


def ignored(family: Any, config: Any) -> tuple[str, ...]:
    """``ModelSpec.ignored_weights`` for a class of models: the tensors that transformers drops.

    It drops only what no parameter takes, so patterns of layers that this model has are left out.
    """
    layers = getattr(config, "num_hidden_layers", 0)
    patterns = []
    for pattern in getattr(family, "_keys_to_ignore_on_load_unexpected", None) or ():
        glob = pattern.removeprefix("^").replace(".*", "*").replace("\\.", ".")
        index = re.search(r"layers\.(\d+)", glob)
        if re.search(r"[\\()|+?\[\]$^]", glob) or (index and int(index[1]) < layers):
            continue
        patterns += [f"{glob}*"] if glob.startswith("model.") else [f"{glob}*", f"*.{glob}*"]
    return tuple(patterns)


def expert_names(family: Any, config: Any) -> tuple[str, ...]:
    """The last components of one expert's gate, up and down matrices in a checkpoint."""
    sources_by_target: dict[str, list[str]] = {}
    for change in _changes(family, config):
        for target in change.target_patterns:
            sources = [s.removesuffix(".weight").rpartition(".")[2] for s in change.source_patterns]
            sources_by_target[target.rpartition(".")[2]] = sources
    gate_up, down = (
        sources_by_target.get("gate_up_proj", ()),
        sources_by_target.get("down_proj", ()),
    )
    return (*gate_up, *down) if len(gate_up) == 2 and len(down) == 1 else DEFAULT_NAMES


def _changes(family: Any, config: Any) -> Iterator[Any]:
    """What transformers changes when it loads this class, or any of this ``model_type``."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    mapping: Any = get_checkpoint_conversion_mapping

    model_type = getattr(config, "model_type", None)
    yield from mapping(family.__name__) or (mapping(model_type) if model_type else ()) or ()


def _plain(family: Any, source: str, target: str) -> Mapping[str, str]:
    """A renaming without regular expressions: at the start of a name, or from a dot on."""
    is_anchored = source.startswith("^")
    text = source.removeprefix("^").replace("\\.", ".")
    if re.search(r"[\\()|+*?\[\]$^]", text):
        raise refusal(family.__name__, f"its checkpoints name tensors by the pattern {source!r}")
    target = target.replace("\\.", ".")
    if is_anchored or text.startswith("."):
        return {text: target}
    return {f".{text}": f".{target}"}
