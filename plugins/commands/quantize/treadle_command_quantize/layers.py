"""Which matrices of a checkpoint a model would quantize: the model's plugin is built without memory, and
its linear layers ask for a method of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from treadle.api.cache import DeviceInfo
from treadle.api.files import ModelFiles
from treadle.api.kinds import QUANTIZATION
from treadle.api.models import ExpertsSpec, LinearSpec
from treadle.api.plugin_kind import PluginKind
from treadle.plugins import PluginManager
from treadle_layers_kit import SingleRankCommunicator
from treadle_layers_kit.quantized import is_layer_skipped
from treadle_worker_kit.build import empty_model
from treadle_worker_kit.model_config import read_config

__all__ = ("Layers",)

EXPERT = re.compile(r"\.\d+\.(?=[^.]+$)")
ASKED = "asked"


class Layers:
    """The matrices of a model's linear layers, by their names in the checkpoint.

    Of a layer that fuses several, all are left as they are or none. ``ignore`` are names of modules to leave.
    Raises ``UnsupportedModelError`` if they name a part of such a layer.
    """

    def __init__(self, plugins: PluginManager, files: ModelFiles, ignore: Sequence[str]) -> None:
        recorder = _Recorder(plugins)
        manager: Any = recorder
        _, config = read_config(files, plugins)
        attention: Any = _no_attention
        empty_model(
            config, manager, torch.device("meta"), DeviceInfo("cpu"), torch.float32,
            SingleRankCommunicator(), attention, quantization=ASKED,
        )  # fmt: skip
        self._is_left = {
            name: is_layer_skipped(LinearSpec(name, names, 0, (), False, torch.float32), ignore)
            for names in recorder.layers
            for name in names
        }

    def is_left(self, name: str) -> bool | None:
        """Return whether to leave the matrix of this name as it is; ``None``: it is of no linear layer."""
        # A layer tells of its first expert, and the others are like it.
        return self._is_left.get(name, self._is_left.get(EXPERT.sub(".0.", name)))


class _Recorder:
    """A plugin manager whose quantization leaves every layer as it is, and notes what it is asked for."""

    def __init__(self, plugins: PluginManager) -> None:
        self._plugins = plugins
        self.name = ASKED
        self.layers: list[tuple[str, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plugins, name)

    def create_guarded(self, kind: PluginKind[Any], key: str, **arguments: Any) -> Any:
        if kind is QUANTIZATION:
            return self
        return self._plugins.create_guarded(kind, key, **arguments)

    def linear_method(self, spec: LinearSpec) -> None:
        self.layers.append(spec.names)

    def experts_method(self, spec: ExpertsSpec) -> None:
        """Its matrices are asked for one by one next, but are alike."""

    def kv_cache_dtype(self, layer: str) -> None:
        """Caches are not quantized here."""


def _no_attention(request: Any, spec: Any) -> None:
    """Nothing is computed, so that attention needs no backend."""
