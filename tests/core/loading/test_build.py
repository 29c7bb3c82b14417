"""Choosing the plugins of a checkpoint, and building without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treadle.api.cache import DeviceInfo
from treadle.api.files import ModelFiles
from treadle.api.matching import ModelTraits
from treadle.api.models import LinearSpec, ModelContext, ModelSpec
from treadle.errors import CheckpointError, PluginNotFoundError, UnsupportedModelError
from treadle.layers import Linear, NullCollective
from treadle.loading import build_model
from treadle.loading.build import find_model, find_scheme
from treadle.loading.formats import DummyLoader, TorchLoader, detect_format, treadle_load_format
from treadle.plugins import PluginManager
from treadle.plugins.matching import Candidate
from treadle.testing.attention_reference import ReferenceBackend
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel

CPU = DeviceInfo("cpu")


@pytest.fixture(scope="module")
def host() -> PluginManager:
    return PluginManager()


class FakeHost:
    """A host whose plugins are given as dictionaries."""

    def __init__(self, models: Mapping[str, Any] = {}, schemes: Mapping[str, Any] = {}) -> None:
        self.tables = {"models": dict(models), "quantization": dict(schemes)}

    def _found(self, kind: str, key: str) -> Any:
        if key not in self.tables[kind]:
            known = ", ".join(self.tables[kind])
            raise PluginNotFoundError(
                f"no plugin provides {kind}:{key} (known: {known}); pip install its-{key.lower()}"
            )
        return self.tables[kind][key]

    def model(self, architecture: str, hf_config: Any) -> ModelSpec:
        return self._found("models", architecture)

    def quantization(self, method: str, checkpoint: Mapping[str, Any], device: DeviceInfo) -> Any:
        return self._found("quantization", method)(checkpoint)

    def matches(self, kind: str, model: ModelTraits) -> list[Candidate]:
        marks = {"awq": "w_bit"}
        config = model.config["quantization_config"]
        return [
            Candidate(key, 50 * (marks.get(key) in config), "its key is there")
            for key in sorted(self.tables[kind])
        ]

    def load_format(self, format: str, files: ModelFiles) -> Any:
        return treadle_load_format(format, files, {})

    def options(self, kind: str, key: str) -> Mapping[str, Any]:
        return {"key": key}


def test_an_unknown_architecture_names_what_is_installed_and_what_would_help() -> None:
    host = FakeHost({"Known": ModelSpec("Known", lambda ctx: None)})  # type: ignore[arg-type,return-value]
    config = SimpleNamespace(architectures=["Gemma"])
    with pytest.raises(UnsupportedModelError) as caught:
        find_model(host, config)
    assert "needs a plugin for Gemma: no plugin provides models:Gemma" in str(caught.value)
    assert "known: Known" in str(caught.value)
    assert "pip install its-gemma" in str(caught.value)


def test_the_first_known_architecture_is_taken() -> None:
    spec = ModelSpec("B", lambda ctx: None)  # type: ignore[arg-type,return-value]
    assert find_model(FakeHost({"B": spec}), SimpleNamespace(architectures=["A", "B"])) is spec


def test_a_configuration_without_architecture() -> None:
    with pytest.raises(UnsupportedModelError, match="hf_overrides"):
        find_model(FakeHost(), SimpleNamespace())


def test_the_scheme_is_that_of_the_checkpoint_or_of_the_user() -> None:
    host = FakeHost(schemes={"awq": dict, "fp8": lambda c: "fp8"})
    config = SimpleNamespace(quantization_config={"quant_method": "awq", "bits": 4})
    assert find_scheme(host, config, CPU) == {"quant_method": "awq", "bits": 4}
    assert find_scheme(host, config, CPU, "fp8") == "fp8"
    assert find_scheme(host, SimpleNamespace(), CPU) is None
    with pytest.raises(UnsupportedModelError, match=r"with 'gptq': .*known: awq, fp8.*its-gptq"):
        find_scheme(host, SimpleNamespace(quantization_config={"quant_method": "gptq"}), CPU)
    unnamed = SimpleNamespace(quantization_config={"w_bit": 4})
    assert find_scheme(host, unnamed, CPU) == {"w_bit": 4}
    with pytest.raises(CheckpointError, match="names no quant_method"):
        find_scheme(host, SimpleNamespace(quantization_config={"bits": 4}), CPU)


class One(nn.Module):
    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.up = Linear(ctx, "model.up", 4, 2)


class Scheme:
    name = "recording"

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        self.specs: list[LinearSpec] = []

    def linear(self, spec: LinearSpec) -> None:
        self.specs.append(spec)

    def kv_dtype(self, layer: str) -> None: ...
    def experts(self, spec: Any) -> None: ...


def build(host: Any, config: Any, files: ModelFiles | None = None, **options: Any) -> Any:
    return build_model(
        files or ModelFiles(Path("/nowhere"), (), {}),
        config,
        host,
        torch.device("cpu"),
        torch.float32,
        NullCollective(),
        lambda request, spec: ReferenceBackend(request),
        **options,
    )


def test_a_scheme_sees_names_of_the_checkpoint_where_the_model_renames() -> None:
    scheme = Scheme({})
    spec = ModelSpec("M", One, renamed={"language_model.model.": "model."})  # type: ignore[arg-type]
    host = FakeHost({"M": spec}, {"q": lambda checkpoint: scheme})
    config = SimpleNamespace(architectures=["M"], quantization_config={"quant_method": "q"})
    model, found = build(host, config, load_format="dummy", max_model_len=9)
    assert found is spec
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

    host = FakeHost({"M": ModelSpec("M", Root)}, {"q": Renaming})  # type: ignore[arg-type]
    config = SimpleNamespace(architectures=["M"], quantization_config={"quant_method": "q"})
    torch.save({"odd.up": torch.ones(2, 4), "dropped": torch.ones(1)}, tmp_path / "model.pt")
    files = ModelFiles(tmp_path, ("model.pt",), {})
    model, _ = build(host, config, files=files)
    assert model.model.up.weight.tolist() == [[1.0] * 4] * 2


def test_what_a_plugin_builds_must_be_a_module() -> None:
    host = FakeHost({"M": ModelSpec("M", lambda ctx: 3)})  # type: ignore[arg-type,return-value]
    with pytest.raises(UnsupportedModelError, match="built a int"):
        build(host, SimpleNamespace(architectures=["M"]), load_format="dummy")


def test_no_weights_at_all() -> None:
    host = FakeHost({"M": ModelSpec("M", One)})  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="nowhere holds no weights"):
        build(host, SimpleNamespace(architectures=["M"]))


# ------------------------------------------------------------------------------ formats


def test_formats_are_detected() -> None:
    def having(*names: str) -> str | None:
        return detect_format(ModelFiles(Path("/nowhere"), names, {}))

    assert having("a.bin", "model.safetensors") == "safetensors"
    assert having("pytorch_model-00001-of-00002.bin") == "pt"
    assert having("config.json") is None


def test_the_hook_opens_three_formats(tmp_path: Path) -> None:
    files = ModelFiles(tmp_path, (), {})
    assert treadle_load_format("gguf", files, {}) is None
    assert isinstance(treadle_load_format("dummy", files, {"seed": 3}), DummyLoader)
    (tmp_path / "x.pt").write_bytes(b"")
    assert isinstance(
        treadle_load_format("pt", ModelFiles(tmp_path, ("x.pt",), {}), {}), TorchLoader
    )
    with pytest.raises(CheckpointError, match="no weights in the format 'safetensors'"):
        treadle_load_format("safetensors", files, {})


# ------------------------------------------------------------------------- dummy weights


def dummy(folder: Path, host: PluginManager, **options: Any) -> TinyModel:
    return TinyModel(folder, host, load_format="dummy", **options)


def test_dummy_weights_give_finite_logits_that_depend_on_the_input(
    tmp_path: Path, host: PluginManager
) -> None:
    folder = make_checkpoint(tmp_path, attention_bias=True)
    (folder / "model.safetensors").unlink()
    model = dummy(folder, host)
    logits = model.logits(torch.arange(20))
    assert logits.isfinite().all()
    assert len(set(logits.argmax(-1).tolist())) > 5
    assert torch.equal(dummy(folder, host).logits(torch.arange(20)), logits), "not reproducible"


def test_dummy_seeds(tmp_path: Path) -> None:
    def drawn(seed: int) -> Tensor:
        host = FakeHost({"M": ModelSpec("M", One)})  # type: ignore[arg-type]
        config = SimpleNamespace(architectures=["M"])
        model, _ = build(host, config, load_format="dummy", seed=seed)
        weight: Tensor = model.up.weight
        return weight

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    drawn(-5)


def test_dummy_fills_quantized_parameters(tmp_path: Path) -> None:
    from treadle.layers import weight
    from treadle.loading.dummy import fill_randomly

    module = nn.Module()
    module.packed = weight([64, 64], torch.int32)
    module.bytes = weight([64, 64], torch.uint8)
    module.eighth = weight([64, 64], torch.float8_e4m3fn)
    module.order = weight([64], torch.int32)
    module.scale = weight([64], torch.float32)
    fill_randomly(module, 0)
    assert module.packed.unique().numel() > 4000
    assert module.bytes.unique().numel() > 200
    assert module.eighth.float().isfinite().all()
    assert module.order.tolist() == [0] * 64
    assert module.scale.tolist() == [1.0] * 64
