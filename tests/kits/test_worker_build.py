"""Choosing the plugins of a checkpoint, and building without one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import Tensor, nn

from treadle.api import impl
from treadle.api.cache import DeviceInfo
from treadle.api.files import ModelFiles
from treadle.api.matching import Match, ModelTraits
from treadle.api.models import LinearSpec, ModelContext, ModelSpec
from treadle.config import PluginConfig
from treadle.errors import CheckpointError, UnsupportedModelError
from treadle.loading.formats import detect_format
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry, scan
from treadle.testing.attention_reference import ReferenceBackend
from treadle_layers_kit import Linear, SingleRankCommunicator
from treadle_worker_kit.build import (
    build_model,
    check_layers,
    create_quantization_scheme,
    find_model,
)

CPU = DeviceInfo("cpu")


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


def make_plugins(models: Mapping[str, Any] = {}, schemes: Mapping[str, Any] = {}) -> PluginManager:
    """A plugin manager with the core's plugins, the load formats, and these models and quantization schemes."""
    plugin: Any = ModuleType(f"plugin_{uuid4().hex}")
    sys.modules[plugin.__name__] = plugin

    @impl
    def treadle_model(architecture: str) -> ModelSpec | None:
        return models.get(architecture)

    @impl
    def treadle_quantization(method: str, checkpoint: Mapping[str, Any]) -> Any:
        return schemes[method](checkpoint)

    @impl
    def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
        marks = {"awq": "w_bit"}
        matches = marks.get(key) in model.config["quantization_config"]
        return Match(50, "its key is there") if matches else None

    plugin.treadle_model, plugin.treadle_quantization = treadle_model, treadle_quantization
    plugin.treadle_match = treadle_match

    def source() -> Iterator[Entry]:
        yield from (e for e in scan() if e.kind == "load_formats" or e.dist == "treadle-core")
        for kind, keys in (("models", models), ("quantization", schemes)):
            yield from (Entry(kind, key, plugin.__name__, "test-plugin", "1") for key in keys)

    options = {f"models:{key}": {"key": key} for key in models}
    return PluginManager(PluginConfig(plugin_options=options), source=source)


def test_an_unknown_architecture_names_what_is_installed_and_what_would_help() -> None:
    plugins = make_plugins({"Known": ModelSpec("Known", lambda ctx: None)})  # type: ignore[arg-type,return-value]
    config = SimpleNamespace(architectures=["GemmaForCausalLM"])
    with pytest.raises(UnsupportedModelError) as exc_info:
        find_model(plugins, config)
    assert "needs a plugin for GemmaForCausalLM: no plugin provides models:GemmaFor" in str(
        exc_info.value
    )
    assert "known: Known" in str(exc_info.value)
    assert "pip install './kits/layers' './plugins/models/gemma'" in str(exc_info.value)


def test_the_first_known_architecture_is_taken() -> None:
    spec = ModelSpec("B", lambda ctx: None)  # type: ignore[arg-type,return-value]
    assert (
        find_model(
            make_plugins({"B": spec}), SimpleNamespace(architectures=["A", "B"])
        ).architecture
        == "B"
    )


def test_a_configuration_without_architecture() -> None:
    with pytest.raises(UnsupportedModelError, match="hf_overrides"):
        find_model(make_plugins(), SimpleNamespace())


def test_the_scheme_is_that_of_the_checkpoint_or_of_the_user() -> None:
    plugins = make_plugins(schemes={"awq": Scheme, "fp8": Scheme})
    config = SimpleNamespace(quantization_config={"quant_method": "awq", "bits": 4})

    def checkpoint(config: Any, option: str = "auto") -> Any:
        scheme: Any = create_quantization_scheme(plugins, config, CPU, option)
        return scheme.guard.entry.id, scheme.checkpoint

    options = {"quant_method": "awq", "bits": 4}
    assert checkpoint(config) == ("quantization:awq", options)
    assert checkpoint(config, "fp8") == ("quantization:fp8", options)
    assert create_quantization_scheme(plugins, SimpleNamespace(), CPU) is None
    with pytest.raises(UnsupportedModelError, match=r"with 'gptq': .*known: awq, fp8.*gptq"):
        create_quantization_scheme(
            plugins, SimpleNamespace(quantization_config={"quant_method": "gptq"}), CPU
        )
    unnamed = SimpleNamespace(quantization_config={"w_bit": 4})
    assert checkpoint(unnamed) == ("quantization:awq", {"w_bit": 4})
    with pytest.raises(CheckpointError, match="has no quant_method"):
        create_quantization_scheme(plugins, SimpleNamespace(quantization_config={"bits": 4}), CPU)


class One(nn.Module):
    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.up = Linear(ctx, "model.up", 4, 2)


class Scheme:
    name = "recording"

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        self.specs: list[LinearSpec] = []
        self.checkpoint = checkpoint

    def linear_method(self, spec: LinearSpec) -> None:
        self.specs.append(spec)

    def kv_cache_dtype(self, layer: str) -> None: ...
    def experts_method(self, spec: Any) -> None: ...


def build(plugins: Any, config: Any, files: ModelFiles | None = None, **options: Any) -> Any:
    return build_model(
        files or ModelFiles(Path("/nowhere"), (), {}),
        config,
        plugins,
        torch.device("cpu"),
        torch.float32,
        SingleRankCommunicator(),
        lambda request, spec: ReferenceBackend(request),
        **options,
    )


def test_a_scheme_sees_names_of_the_checkpoint_where_the_model_renames() -> None:
    scheme = Scheme({})
    spec = ModelSpec("M", One, weight_prefix_map={"language_model.model.": "model."})  # type: ignore[arg-type]
    plugins = make_plugins({"M": spec}, {"q": lambda checkpoint: scheme})
    config = SimpleNamespace(architectures=["M"], quantization_config={"quant_method": "q"})
    model, built_spec = build(plugins, config, load_format="dummy", max_model_len=9)
    assert built_spec.weight_prefix_map == spec.weight_prefix_map
    assert scheme.specs[0].prefix == "model.up"
    assert scheme.specs[0].names == ("language_model.model.up",)
    assert model.ctx.max_model_len == 9
    assert model.ctx.options == {"key": "M"}
    assert not model.training


def test_a_scheme_that_renames_is_asked(tmp_path: Path) -> None:
    class Renaming(Scheme):
        def rename(self, name: str) -> str | None:
            return {"odd.up": "model.up.weight"}.get(name)

    class Root(nn.Module):
        def __init__(self, ctx: ModelContext) -> None:
            super().__init__()
            self.model = One(ctx)

    plugins = make_plugins({"M": ModelSpec("M", Root)}, {"q": Renaming})  # type: ignore[arg-type]
    config = SimpleNamespace(architectures=["M"], quantization_config={"quant_method": "q"})
    torch.save({"odd.up": torch.ones(2, 4), "dropped": torch.ones(1)}, tmp_path / "model.pt")
    files = ModelFiles(tmp_path, ("model.pt",), {})
    model, _ = build(plugins, config, files=files, load_format="pt")
    assert model.model.up.weight.tolist() == [[1.0] * 4] * 2


def test_what_a_plugin_builds_must_be_a_module() -> None:
    plugins = make_plugins({"M": ModelSpec("M", lambda ctx: 3)})  # type: ignore[arg-type,return-value]
    with pytest.raises(UnsupportedModelError, match="built a int"):
        build(plugins, SimpleNamespace(architectures=["M"]), load_format="dummy")


def test_no_weights_at_all() -> None:
    plugins = make_plugins({"M": ModelSpec("M", One)})  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="nowhere has no weights"):
        build(plugins, SimpleNamespace(architectures=["M"]))


# ------------------------------------------------------------------------------ formats


def test_only_safetensors_are_detected() -> None:
    def having(*names: str) -> bool:
        return detect_format(ModelFiles(Path("/nowhere"), names, {})) is not None

    assert having("a.bin", "model.safetensors")
    assert not having("pytorch_model-00001-of-00002.bin")
    assert not having("config.json")


def test_a_format_gets_the_seed_of_the_engine() -> None:
    def drawn(seed: int) -> Tensor:
        plugins = make_plugins({"M": ModelSpec("M", One)})  # type: ignore[arg-type]
        config = SimpleNamespace(architectures=["M"])
        model, _ = build(plugins, config, load_format="dummy", seed=seed)
        weight: Tensor = model.up.weight
        return weight

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    drawn(-5)


def test_layers_are_counted_by_the_names_of_tensors() -> None:
    names = ["embed.weight", "model.layers.0.w", "model.layers.11.mlp.experts.63.w", "vision.3.w"]
    for accepted in (None, 1, 12):
        check_layers(accepted, names, "m")
    check_layers(99, ["a.weight"], "names without numbers say nothing")
    with pytest.raises(CheckpointError, match=r"is 13, but .* 12 layers \(model\.layers\.0 to "):
        check_layers(13, names, "m")
