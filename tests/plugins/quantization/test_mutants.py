"""The formats' own traps: plugins that fall into one each, and the check that finds it.

That each check of the suite bites is shown by ``tests/conformance/test_mutants.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from treadle_awq import scheme as awq
from treadle_fp8 import linear as fp8
from treadle_fp8 import scheme as fp8_scheme
from treadle_gptq import linear as gptq
from treadle_gptq import scheme as gptq_scheme
from treadle_gptq.config import read_config

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearSpec, QuantizationScheme
from treadle.testing.packing import AwqFormat, Format, Fp8Format, GptqFormat
from treadle.testing.quantization import QuantizationSuite

CPU = DeviceInfo("cpu")


def suite(plugin: str, format: Format, scheme: Callable[[Mapping[str, Any]], Any]) -> Any:
    """A suite over one format, with a scheme that is not what the plugin manager would find."""

    class Mutated(QuantizationSuite):
        formats = {"the format": format}

        def scheme(self, config: Mapping[str, Any]) -> QuantizationScheme:
            mutated: QuantizationScheme = scheme(config)
            return mutated

    Mutated.plugin = plugin
    return Mutated()


@dataclass
class Wrapped:
    """A scheme whose layers are changed."""

    inner: Any
    change: Callable[[Any], None]
    name: str = "wrapped"

    def linear_method(self, spec: LinearSpec) -> Any:
        method = self.inner.linear_method(spec)
        if method is not None:
            self.change(method)
        return method


def awq_scheme(config: Mapping[str, Any]) -> Any:
    from treadle_awq.config import read_config as read

    return awq.AwqScheme(read(config), CPU)


APPLIED = "test_every_layer_is_its_dequantized_weight"
SHARED = "test_ranks_share_a_layer"


def test_the_order_of_the_nibbles(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_order(packed: torch.Tensor) -> torch.Tensor:
        return ((packed[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(-2)

    checks = suite("quantization:awq", AwqFormat(), awq_scheme)
    getattr(checks, APPLIED)()
    monkeypatch.setattr(awq, "unpack", in_order)
    monkeypatch.setattr("treadle_awq.packing.unpack", in_order)
    with pytest.raises(AssertionError, match="relative error"):
        getattr(checks, APPLIED)()


def gptq_with(**changes: Any) -> Callable[[Mapping[str, Any]], Any]:
    def scheme(config: Mapping[str, Any]) -> Any:
        return gptq_scheme.GptqScheme(replace(read_config(config), **changes), CPU)

    return scheme


def test_the_one_that_version_1_takes_away() -> None:
    checks = suite("quantization:gptq", GptqFormat(sym=False), gptq_with(zero_offset=0))
    with pytest.raises(AssertionError, match="relative error"):
        getattr(checks, APPLIED)()


@pytest.mark.parametrize("check", [APPLIED, SHARED])
def test_act_order_that_is_ignored(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    def in_order(self: gptq.GptqLinear, stored: torch.Tensor, groups: int) -> torch.Tensor:
        return (self.inputs.start + torch.arange(len(stored))) // self.group

    checks = suite("quantization:gptq", GptqFormat(desc_act=True), gptq_with())
    getattr(checks, check)()
    monkeypatch.setattr(gptq.GptqLinear, "_index", in_order)
    with pytest.raises(AssertionError, match="relative error"):
        getattr(checks, check)()


def test_a_share_of_the_inputs_that_begins_at_0() -> None:
    """Right on one rank."""

    def begin(method: Any) -> None:
        create_weights = method.create_weights

        def created(module: torch.nn.Module, spec: LinearSpec) -> None:
            create_weights(module, spec)
            method.inputs = replace(method.inputs, start=0)

        method.create_weights = created

    checks = suite(
        "quantization:awq", AwqFormat(), lambda config: Wrapped(awq_scheme(config), begin)
    )
    getattr(checks, APPLIED)()
    with pytest.raises(AssertionError, match="rows, rank"):
        getattr(checks, SHARED)()


def test_a_group_index_that_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(config: Mapping[str, Any]) -> Any:
        return gptq_with(default=replace(read_config(config).default, act_order=False))(config)

    checks = suite("quantization:gptq", GptqFormat(desc_act=True), lenient)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        checks.test_what_is_missing_is_named()


def test_one_scale_for_all_fused_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(self: fp8.GatedFp8Linear, scales: torch.Tensor) -> torch.Tensor:
        return scales.amax().expand(sum(self.sizes), 1)

    def scheme(config: Mapping[str, Any]) -> Any:
        from treadle_fp8.config import read_config as read

        return fp8_scheme.Fp8Scheme(read("fp8", config), CPU)

    checks = suite("quantization:fp8", Fp8Format(), scheme)
    getattr(checks, APPLIED)()
    monkeypatch.setattr(fp8.GatedFp8Linear, "expand", largest)
    with pytest.raises(AssertionError, match="fused"):
        getattr(checks, APPLIED)()


def test_a_model_with_rounded_scales(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expand = fp8.GatedFp8Linear.expand

    def coarse(self: fp8.GatedFp8Linear, scales: torch.Tensor) -> torch.Tensor:
        return expand(self, scales.bfloat16().float())

    class Checks(QuantizationSuite):
        plugin = "quantization:fp8"
        formats = {"matrix": Fp8Format()}

    Checks().test_a_model_is_its_dequantized_self(tmp_path / "right")
    monkeypatch.setattr(fp8.GatedFp8Linear, "expand", coarse)
    with pytest.raises(AssertionError, match="matrix"):
        Checks().test_a_model_is_its_dequantized_self(tmp_path / "wrong")
