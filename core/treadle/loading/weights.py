"""Loading a checkpoint's tensors into a model; checks that all are used and none is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from treadle.api.communicators import Communicator
from treadle.api.files import SupportsFill, SupportsTensorFiles, WeightLoader
from treadle.api.models import ModelSpec
from treadle.errors import CheckpointError
from treadle.layers.weight import (
    SupportsPostLoad,
    SupportsWeightLookup,
    WeightMismatchError,
    WeightTarget,
    layout_of,
    load_weight,
    slots,
)

__all__ = ("finish", "load_weights", "to_checkpoint_name", "to_model_name")

# Derived values that some older checkpoints contain. They are not loaded.
DERIVED = ("*.rotary_emb.inv_freq", "*.rotary_pos_emb.inv_freq", "*.attn.masked_bias")

Rename = Callable[[str], "str | None"]


def load_weights(
    model: nn.Module,
    spec: ModelSpec,
    loader: WeightLoader,
    tp_group: Communicator,
    *,
    rename: Rename | None = None,
) -> None:
    """Load the weights of ``model`` from ``loader`` and post-process its layers.

    Every checkpoint tensor is used exactly once, unless ``spec.ignored_weights`` matches it, and
    every parameter is filled exactly once. ``rename``, of the quantization scheme, maps names of
    the checkpoint, to ``None`` if a tensor is not needed. Raises ``CheckpointError`` with the names
    of tensors that are missing, unknown, duplicate or of the wrong shape.
    """
    with torch.no_grad():
        if isinstance(loader, SupportsFill):
            loader.fill(model)
        else:
            _WeightLoading(model, spec, loader, tp_group, rename).run()
        finish(model)


def finish(model: nn.Module) -> None:
    """Call ``finish`` of every layer that has it, to repack the loaded weights."""
    for module in list(model.modules()):
        if isinstance(module, SupportsPostLoad):
            module.process_weights_after_loading()


class _WeightLoading:
    """The state of loading: which parts of which parameters are still empty."""

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        loader: WeightLoader,
        tp_group: Communicator,
        rename: Rename | None,
    ) -> None:
        self.spec, self.loader, self.tp_group, self.rename = spec, loader, tp_group, rename
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        self.aliases = {
            name: first[id(parameter)]
            for name, parameter in self.parameters.items()
            if first.setdefault(id(parameter), name) != name
        }
        self.empty: dict[str, set[WeightTarget]] = {
            name: set(slots(name, parameter))
            for name, parameter in self.parameters.items()
            if name not in self.aliases
        }
        self.sizes = {name: len(found) for name, found in self.empty.items()}
        self.from_alias: set[str] = set()
        self.stacked = {  # last component of a checkpoint name -> (the model's component, index)
            theirs: (ours, index)
            for ours, names in spec.packed_modules_mapping.items()
            for index, theirs in enumerate(names)
        }
        self.unknown: list[str] = []

    def run(self) -> None:
        for name, tensor in self.loader.tensors(self.should_load):
            slot = self.locate(name)
            if slot is not None:
                self.fill(name, tensor, slot)
        self.fill_defaults()
        self.report()

    def should_load(self, name: str) -> bool:
        """Return whether to load a checkpoint tensor. Records unknown names for the report."""
        if any(fnmatchcase(name, pattern) for pattern in (*DERIVED, *self.spec.ignored_weights)):
            return False
        if self.rename is not None and self.rename(name) is None:
            return False
        if self.locate(name) is None:
            self.unknown.append(name)
            return False
        return True

    def locate(self, name: str) -> WeightTarget | None:
        """Return the target of a checkpoint tensor, or ``None`` if it is unknown or not needed."""
        renamed = self.rename(name) if self.rename is not None else name
        if renamed is None:
            return None
        name = to_model_name(renamed, self.spec.weight_prefix_map)
        if name in self.parameters:
            return WeightTarget(name)
        path, _, leaf = name.rpartition(".")
        for candidate, part in self.fusions(path):
            if (whole := f"{candidate}.{leaf}") in self.parameters:
                return WeightTarget(whole, part)
        return self.by_module(name)

    def fusions(self, path: str) -> Iterator[tuple[str, int]]:
        for theirs, (ours, index) in self.stacked.items():
            if path == theirs or path.endswith(f".{theirs}"):
                yield path[: len(path) - len(theirs)] + ours, index

    def by_module(self, name: str) -> WeightTarget | None:
        """Return the target from the nearest parent module with a ``locate`` method (experts)."""
        path = name
        while "." in path:
            path = path.rpartition(".")[0]
            module = self.modules.get(path)
            if isinstance(module, SupportsWeightLookup):
                found = module.locate(name[len(path) + 1 :])
                return found and found._replace(parameter=f"{path}.{found.parameter}")
        return None

    def fill(self, name: str, tensor: Tensor, slot: WeightTarget) -> None:
        alias = slot.parameter in self.aliases
        own = self.aliases.get(slot.parameter, slot.parameter)
        slot = slot._replace(parameter=own)
        taken = {s for s in slots(own, self.parameters[own]) if _within(s, slot)}
        if alias and not taken <= self.empty[own]:
            return  # tied weights: the checkpoint has the shared tensor under both names
        if own in self.from_alias and not alias:
            self.from_alias.discard(own)
            self.empty[own] |= taken
        if not taken or not taken <= self.empty[own]:
            raise CheckpointError(
                f"{name} in {self.where(name)} fills {own} a second time; the checkpoint has "
                "a matrix twice, or the model plugin's fused names are wrong"
            )
        again = len(self.empty[own]) < self.sizes[own]
        try:
            load_weight(self.parameters[own], tensor, slot, again=again)
        except WeightMismatchError as error:
            raise CheckpointError(self.mismatch(name, tensor, own, error)) from error
        self.empty[own] -= taken
        if alias:
            self.from_alias.add(own)

    def fill_defaults(self) -> None:
        for name, missing in self.empty.items():
            default = layout_of(self.parameters[name]).default
            if default is not None and len(missing) == self.sizes[name]:
                self.parameters[name].data.fill_(default)
                missing.clear()

    def report(self) -> None:
        lines: list[str] = []
        missing = [self.parameter_names(name, found) for name, found in self.empty.items() if found]
        if missing:
            lines.append(f"parameters without a tensor ({len(missing)}): {_some(missing)}")
        if self.unknown:
            lines.append(
                f"tensors without a parameter ({len(self.unknown)}): {_some(self.unknown)}"
            )
        if lines:
            raise CheckpointError(
                f"the checkpoint does not fit {self.spec.architecture}:\n  "
                + "\n  ".join(lines)
                + "\ncheck that config.json belongs to these weights, and that the quantization "
                "and model plugins support this kind of checkpoint"
            )

    def parameter_names(self, name: str, missing: set[WeightTarget]) -> str:
        """Return the checkpoint's names of the missing parts of a parameter."""
        path, _, leaf = name.rpartition(".")
        items = sorted({slot.item for slot in missing if slot.item is not None})
        if items:
            return f"{name} (of {', '.join(map(str, items[:8]))}{', …' if len(items) > 8 else ''})"
        parts = {slot.part for slot in missing}
        for ours, theirs in self.spec.packed_modules_mapping.items():
            if path == ours or path.endswith(f".{ours}"):
                home = path[: len(path) - len(ours)]
                absent = [f"{home}{n}.{leaf}" for i, n in enumerate(theirs) if i in parts]
                return ", ".join(absent) or name
        return name

    def mismatch(self, name: str, tensor: Tensor, own: str, error: WeightMismatchError) -> str:
        parameter = self.parameters[own]
        alone = (
            ""
            if self.tp_group.world_size == 1
            else f" on rank {self.tp_group.rank} of {self.tp_group.world_size}"
        )
        return (
            f"{name} in {self.where(name)} is {_described(tensor)}, which does not fit {own} "
            f"{_described(parameter)}{alone}: {error}; check that config.json belongs to these "
            "weights"
        )

    def where(self, name: str) -> str:
        return (
            self.loader.file_of(name)
            if isinstance(self.loader, SupportsTensorFiles)
            else "the checkpoint"
        )


def to_model_name(name: str, renamed: Mapping[str, str]) -> str:
    """Return the model's name of a checkpoint tensor, by ``ModelSpec.weight_prefix_map``."""
    for theirs, ours in renamed.items():
        if theirs.startswith("."):
            name = name.replace(theirs, ours)
    for theirs, ours in renamed.items():
        if name.startswith(theirs):
            return ours + name[len(theirs) :]
    return name


def to_checkpoint_name(name: str, renamed: Mapping[str, str]) -> str:
    """Return the checkpoint's name of the model's ``name``: the inverse of ``to_model_name``."""
    for theirs, ours in renamed.items():
        if not theirs.startswith(".") and name.startswith(ours):
            name = theirs + name[len(ours) :]
            break
    for theirs, ours in renamed.items():
        if theirs.startswith("."):
            name = name.replace(ours, theirs)
    return name


def _within(slot: WeightTarget, filled: WeightTarget) -> bool:
    return (filled.part is None or slot.part == filled.part) and (
        filled.item is None or slot.item == filled.item
    )


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:8])
    return shown + (", …" if len(names) > 8 else "")
