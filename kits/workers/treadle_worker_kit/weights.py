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
from treadle_layers_kit import (
    SupportsPostLoad,
    SupportsWeightLookup,
    WeightMismatchError,
    WeightTarget,
    layout_of,
)
from treadle_worker_kit.mapped_parts import MappedParts
from treadle_worker_kit.shards import load_weight, weight_targets
from treadle_worker_kit.stored_values import has_nan_bytes, problem_of_scales

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
    progress: Callable[[], None] | None = None,
) -> None:
    """Load the weights of ``model`` from ``loader`` and post-process its layers.

    Every checkpoint tensor is used exactly once, unless ``spec.ignored_weights`` matches it, and
    every parameter is filled exactly once. ``rename``, of the quantization scheme, maps names of
    the checkpoint, to ``None`` if a tensor is not needed. ``progress`` is called for each tensor. Raises
    ``CheckpointError`` with the names of tensors that are missing, unknown, duplicate or of the wrong shape.
    """
    with torch.no_grad():
        if isinstance(loader, SupportsFill):
            loader.fill(model)
        else:
            _WeightLoading(model, spec, loader, tp_group, rename).run(progress)
        finish(model)


def finish(model: nn.Module) -> None:
    """Call ``process_weights_after_loading`` of every layer that has it, after those of its own modules."""
    for module in list(_inner_first(model, set())):
        if isinstance(module, SupportsPostLoad):
            module.process_weights_after_loading()


def _inner_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield each module once, after its own modules."""
    for child in module.children():
        if child not in seen:
            yield from _inner_first(child, seen)
    seen.add(module)
    yield module


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
        self.unfilled: dict[str, set[WeightTarget]] = {
            name: set(weight_targets(name, parameter))
            for name, parameter in self.parameters.items()
            if name not in self.aliases
        }
        self.sizes = {name: len(targets) for name, targets in self.unfilled.items()}
        self.from_alias: set[str] = set()
        self.stacked = {  # last component of a checkpoint name -> (the model's component, index)
            checkpoint_name: (model_name, index)
            for model_name, names in spec.packed_modules_mapping.items()
            for index, checkpoint_name in enumerate(names)
        }
        self.unknown: list[str] = []
        self.mapped = MappedParts(getattr(loader, "treadle_maps_files", False))

    def run(self, progress: Callable[[], None] | None = None) -> None:
        for name, tensor in self.loader.tensors(self.should_load):
            if progress is not None:
                progress()
            slot = self.locate(name)
            if slot is not None:
                self.fill(name, tensor, slot)
        self.mapped.close()
        self.fill_defaults()
        self.report()
        self.check_bytes()

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
        new_name = self.rename(name) if self.rename is not None else name
        if new_name is None:
            return None
        name = to_model_name(new_name, self.spec.weight_prefix_map)
        if name in self.parameters:
            return WeightTarget(name)
        path, _, leaf = name.rpartition(".")
        for candidate, part in self.fusions(path):
            if (full_name := f"{candidate}.{leaf}") in self.parameters:
                return WeightTarget(full_name, part)
        return self.by_module(name)

    def fusions(self, path: str) -> Iterator[tuple[str, int]]:
        for checkpoint_name, (model_name, index) in self.stacked.items():
            if path == checkpoint_name or path.endswith(f".{checkpoint_name}"):
                yield path[: len(path) - len(checkpoint_name)] + model_name, index

    def by_module(self, name: str) -> WeightTarget | None:
        """Return the target from the nearest parent module with a ``locate`` method (experts)."""
        path = name
        while "." in path:
            path = path.rpartition(".")[0]
            module = self.modules.get(path)
            if isinstance(module, SupportsWeightLookup):
                target = module.locate(name[len(path) + 1 :])
                return target and target._replace(parameter=f"{path}.{target.parameter}")
        return None

    def fill(self, name: str, tensor: Tensor, slot: WeightTarget) -> None:
        alias = slot.parameter in self.aliases
        parameter_name = self.aliases.get(slot.parameter, slot.parameter)
        slot = slot._replace(parameter=parameter_name)
        targets = {
            s
            for s in weight_targets(parameter_name, self.parameters[parameter_name])
            if _within(s, slot)
        }
        if alias and not targets <= self.unfilled[parameter_name]:
            return  # tied weights: the checkpoint has the shared tensor under both names
        if parameter_name in self.from_alias and not alias:
            self.from_alias.discard(parameter_name)
            self.unfilled[parameter_name] |= targets
        if not targets or not targets <= self.unfilled[parameter_name]:
            raise CheckpointError(
                f"{name} in {self.file_of(name)} fills {parameter_name} a second time; the checkpoint has "
                "a matrix twice, or the model plugin's fused names are wrong"
            )
        sibling_loaded = len(self.unfilled[parameter_name]) < self.sizes[parameter_name]
        if problem := problem_of_scales(name, tensor):
            raise CheckpointError(
                f"{name} in {self.file_of(name)} cannot be right: {problem}; the file is damaged or was "
                "quantized badly, download it again or use another checkpoint"
            )
        try:
            parameter = self.parameters[parameter_name]
            if not self.mapped.take(parameter, tensor, slot):
                load_weight(parameter, tensor, slot, sibling_loaded=sibling_loaded)
        except WeightMismatchError as error:
            raise CheckpointError(self.mismatch(name, tensor, parameter_name, error)) from error
        self.unfilled[parameter_name] -= targets
        if alias:
            self.from_alias.add(parameter_name)

    def fill_defaults(self) -> None:
        for name, missing in self.unfilled.items():
            default = layout_of(self.parameters[name]).default
            if default is not None and len(missing) == self.sizes[name]:
                self.parameters[name].data.fill_(default)
                missing.clear()

    def check_bytes(self) -> None:
        """Check FP8 parameters where they are now: a device reads them faster than this process.

        Raises ``CheckpointError`` with the tensors that hold bytes that are no number.
        """
        bad = {n for n in self.unfilled if has_nan_bytes(self.parameters[n])}
        if not bad:
            return

        def suspected(name: str) -> bool:
            slot = self.locate(name)
            return slot is not None and self.aliases.get(slot.parameter, slot.parameter) in bad

        tensors = [n for n, tensor in self.loader.tensors(suspected) if has_nan_bytes(tensor)]
        files = ", ".join(sorted({self.file_of(name) for name in tensors}))
        raise CheckpointError(
            f"{_abbreviate(tensors)} in {files} hold bytes that are NaN in FP8; the file is damaged, "
            "or its writer did not bound the weights: download it again, or quantize it anew"
        )

    def report(self) -> None:
        lines: list[str] = []
        missing = [
            self.parameter_names(name, targets)
            for name, targets in self.unfilled.items()
            if targets
        ]
        if missing:
            lines.append(f"parameters without a tensor ({len(missing)}): {_abbreviate(missing)}")
        if self.unknown:
            lines.append(
                f"tensors without a parameter ({len(self.unknown)}): {_abbreviate(self.unknown)}"
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
        for model_name, checkpoint_names in self.spec.packed_modules_mapping.items():
            if path == model_name or path.endswith(f".{model_name}"):
                prefix = path[: len(path) - len(model_name)]
                names = [
                    f"{prefix}{n}.{leaf}" for i, n in enumerate(checkpoint_names) if i in parts
                ]
                return ", ".join(names) or name
        return name

    def mismatch(
        self, name: str, tensor: Tensor, parameter_name: str, error: WeightMismatchError
    ) -> str:
        parameter = self.parameters[parameter_name]
        rank_text = (
            ""
            if self.tp_group.world_size == 1
            else f" on rank {self.tp_group.rank} of {self.tp_group.world_size}"
        )
        return (
            f"{name} in {self.file_of(name)} is {_describe(tensor)}, which does not fit {parameter_name} "
            f"{_describe(parameter)}{rank_text}: {error}; check that config.json belongs to these "
            "weights"
        )

    def file_of(self, name: str) -> str:
        return (
            self.loader.file_of(name)
            if isinstance(self.loader, SupportsTensorFiles)
            else "the checkpoint"
        )


def to_model_name(name: str, prefix_map: Mapping[str, str]) -> str:
    """Return the model's name of a checkpoint tensor, by ``ModelSpec.weight_prefix_map``."""
    for checkpoint_prefix, model_prefix in prefix_map.items():
        if checkpoint_prefix.startswith("."):
            name = name.replace(checkpoint_prefix, model_prefix)
    for checkpoint_prefix, model_prefix in prefix_map.items():
        if name.startswith(checkpoint_prefix):
            return model_prefix + name[len(checkpoint_prefix) :]
    return name


def to_checkpoint_name(name: str, prefix_map: Mapping[str, str]) -> str:
    """Return the checkpoint's name of the model's ``name``: the inverse of ``to_model_name``."""
    for checkpoint_prefix, model_prefix in prefix_map.items():
        if not checkpoint_prefix.startswith(".") and name.startswith(model_prefix):
            name = checkpoint_prefix + name[len(model_prefix) :]
            break
    for checkpoint_prefix, model_prefix in prefix_map.items():
        if checkpoint_prefix.startswith("."):
            name = name.replace(model_prefix, checkpoint_prefix)
    return name


def _within(slot: WeightTarget, target: WeightTarget) -> bool:
    return (target.part is None or slot.part == target.part) and (
        target.item is None or slot.item == target.item
    )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _abbreviate(names: Sequence[str]) -> str:
    text = ", ".join(sorted(names)[:8])
    return text + (", …" if len(names) > 8 else "")
