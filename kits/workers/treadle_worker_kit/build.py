"""Building a model from a checkpoint: architecture, quantization, layers, weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from treadle.api.attention import AttentionBackend, AttentionRequest
from treadle.api.cache import DeviceInfo, KVCacheSpec
from treadle.api.communicators import Communicator
from treadle.api.devices import device_info
from treadle.api.files import ModelFiles, SupportsFill, WeightLoader
from treadle.api.kinds import LOAD_FORMATS, MODELS, QUANTIZATION
from treadle.api.matching import ModelTraits
from treadle.api.models import (
    ExpertsMethod,
    ExpertsSpec,
    LinearMethod,
    LinearSpec,
    ModelContext,
    ModelSpec,
    QuantizationScheme,
    SupportsWeightRenaming,
)
from treadle.errors import CheckpointError, PluginNotFoundError, UnsupportedModelError
from treadle.loading.formats import detect_format, no_weights
from treadle.loading.matching import AUTO, Decision, decide
from treadle.plugins import PluginManager
from treadle_worker_kit.foreign_methods import advice
from treadle_worker_kit.model_config import num_layers, quantization_config
from treadle_worker_kit.weights import load_weights, to_checkpoint_name

__all__ = (
    "build_model",
    "check_layers",
    "create_quantization_scheme",
    "empty_model",
    "find_method",
    "find_model",
)

log = logging.getLogger(__name__)

LAYER_INDEX = re.compile(r"(.*?)\.(\d{1,18})(?:\.|$)")


def build_model(
    files: ModelFiles,
    hf_config: Any,
    plugins: PluginManager,
    device: torch.device,
    dtype: torch.dtype,
    tp_group: Communicator,
    attention: Callable[[AttentionRequest, KVCacheSpec], AttentionBackend],
    *,
    load_format: str = "auto",
    quantization: str = AUTO,
    max_model_len: int | None = None,
    seed: int = 0,
    progress: Callable[[], None] | None = None,
    building: AbstractContextManager[Any] | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
) -> tuple[nn.Module, ModelSpec]:
    """Build the model of a checkpoint on ``device`` and load this rank's shards of its weights.

    The module is a ``CausalModel`` in evaluation mode. ``seed`` is for ``dummy`` weights. ``progress``
    is called for each tensor, ``building`` is entered while the empty model is created, and ``prepare``
    is called with it.
    Raises ``UnsupportedModelError`` if no plugin supports the architecture or the quantization,
    and ``CheckpointError`` if the weights do not fit.
    """
    loader = _loader(plugins, files, load_format, seed)
    start_time = perf_counter()
    if not isinstance(loader, SupportsFill):
        check_layers(num_layers(hf_config), _tensor_names(loader), files.root)
    with building or nullcontext():
        model, spec, scheme = empty_model(
            hf_config,
            plugins,
            device,
            device_info(device),
            dtype,
            tp_group,
            attention,
            quantization=quantization,
            max_model_len=max_model_len,
        )
    if prepare is not None:
        prepare(model)
    load_weights(model, spec, loader, tp_group, rename=_renaming(scheme), progress=progress)
    log.info("loaded %s in %.1f s", spec.architecture, perf_counter() - start_time)
    return model.eval(), spec


def empty_model(
    hf_config: Any,
    plugins: PluginManager,
    device: torch.device,
    info: DeviceInfo,
    dtype: torch.dtype,
    tp_group: Communicator,
    attention: Callable[[AttentionRequest, KVCacheSpec], AttentionBackend],
    *,
    quantization: str = AUTO,
    max_model_len: int | None = None,
) -> tuple[nn.Module, ModelSpec, QuantizationScheme | None]:
    """Build a model with uninitialised parameters; return it with its spec and quantization.

    ``info`` is the device for which kernels are chosen. It may differ from ``device``, which may
    be ``meta`` to use no memory. Raises ``UnsupportedModelError`` as ``build_model`` does.
    """
    spec = find_model(plugins, hf_config)
    scheme = create_quantization_scheme(plugins, hf_config, info, quantization)
    ctx = ModelContext(
        hf_config=hf_config,
        dtype=dtype,
        device=device,
        tp_group=tp_group,
        quantization=_CheckpointNames(scheme, spec.weight_prefix_map)
        if scheme and spec.weight_prefix_map
        else scheme,
        register_attention=attention,
        max_model_len=max_model_len,
        options=plugins.options("models", spec.architecture),
    )
    with torch.device(device):
        model = spec.build(ctx)
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"the plugin for {spec.architecture} built a {type(model).__name__}; "
            "it must build a torch.nn.Module"
        )
    return model, spec, scheme


def find_model(plugins: PluginManager, hf_config: Any) -> ModelSpec:
    """Return the spec of the first architecture that a plugin supports.

    Raises ``UnsupportedModelError`` if there is none; the message says what to install.
    """
    names = list(getattr(hf_config, "architectures", None) or ())
    if not names:
        raise UnsupportedModelError(
            "the configuration has no architecture; set one with "
            'hf_overrides \'{"architectures": ["…"]}\''
        )
    refusals: list[str] = []
    for name in names:
        try:
            return plugins.create_guarded(MODELS, name, hf_config=hf_config)
        except PluginNotFoundError as error:
            refusals.append(str(error))
            cause = error
    raise UnsupportedModelError(
        f"this checkpoint needs a plugin for {' or '.join(names)}: {'; '.join(refusals)}"
    ) from cause


def create_quantization_scheme(
    plugins: PluginManager, hf_config: Any, device: DeviceInfo, option: str = AUTO
) -> QuantizationScheme | None:
    """Return the quantization scheme of a checkpoint, or ``None`` if it is not quantized.

    ``option`` replaces the checkpoint's method unless it is ``auto``. Raises
    ``UnsupportedModelError`` if no plugin supports the method, and ``CheckpointError`` if the
    checkpoint does not name its method and no plugin recognizes it.
    """
    checkpoint = quantization_config(hf_config) or {}
    method = find_method(plugins, hf_config, option).key
    if method is None:
        return None
    try:
        return plugins.create_guarded(QUANTIZATION, method, checkpoint=checkpoint, device=device)
    except PluginNotFoundError as error:
        prefix = (
            "this checkpoint is quantized with" if option == AUTO else "the option quantization is"
        )
        raise UnsupportedModelError(f"{prefix} {method!r}: {error}{advice(method)}") from error


def find_method(plugins: PluginManager, hf_config: Any, option: str = AUTO) -> Decision:
    """Return the method of the option, the checkpoint or a match. Raises ``CheckpointError``."""
    checkpoint = quantization_config(hf_config)
    if option != AUTO:
        return Decision(option, f"--quantization {option}")
    if not checkpoint:
        return Decision(None, "the checkpoint has no quantization_config")
    if method := checkpoint.get("quant_method"):
        return Decision(method, "quantization_config names it as quant_method")
    model = ModelTraits(config={**vars(hf_config), "quantization_config": checkpoint})
    decision = decide(plugins, QUANTIZATION, model, option)
    if decision.key is None:
        raise CheckpointError(
            f"quantization_config has no quant_method (only {', '.join(checkpoint)}) and no "
            "installed plugin recognizes it; set the method with the option quantization"
        )
    return decision


def _loader(plugins: PluginManager, files: ModelFiles, load_format: str, seed: int) -> WeightLoader:
    if load_format == "auto":
        detected = detect_format(files)
        if detected is None:
            raise no_weights(files.root)
        load_format = detected
    return plugins.create_guarded(LOAD_FORMATS, load_format, files=files, seed=seed)


def _tensor_names(loader: WeightLoader) -> list[str]:
    """Return the names of all tensors; a loader checks its files before it yields the first one."""
    names: list[str] = []

    def refuse(name: str) -> bool:
        names.append(name)
        return False

    list(loader.tensors(refuse))
    return names


def check_layers(num_layers: int | None, tensors: Iterable[str], origin: object) -> None:
    """Check that there are tensors for so many layers, by the numbers in their names.

    Raises ``CheckpointError``.
    """
    counts: dict[str, int] = {}
    for name in tensors:
        if match := LAYER_INDEX.match(name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    prefix = max(counts, key=lambda key: counts[key], default=None)
    if prefix is not None and num_layers is not None and num_layers > counts[prefix]:
        raise CheckpointError(
            f"num_hidden_layers of {origin} is {num_layers}, but its tensors are those of "
            f"{counts[prefix]} layers ({prefix}.0 to {prefix}.{counts[prefix] - 1}); check that "
            "config.json belongs to these weights"
        )


def _renaming(scheme: object) -> Callable[[str], str | None] | None:
    return scheme.rename if isinstance(scheme, SupportsWeightRenaming) else None


class _CheckpointNames:
    """A wrapper of a scheme that gives it checkpoint names if the model plugin renames prefixes."""

    def __init__(self, scheme: QuantizationScheme, prefix_map: Mapping[str, str]) -> None:
        self._scheme, self._prefix_map = scheme, prefix_map
        self.name = scheme.name

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        return self._scheme.linear_method(replace(spec, names=self._to_checkpoint_name(spec.names)))

    def experts_method(self, spec: ExpertsSpec) -> ExpertsMethod | None:
        return self._scheme.experts_method(
            replace(spec, names=self._to_checkpoint_name(spec.names))
        )

    def kv_cache_dtype(self, layer: str) -> str | None:
        return self._scheme.kv_cache_dtype(layer)

    def _to_checkpoint_name(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(to_checkpoint_name(name, self._prefix_map) for name in names)
