"""What every scheme reads of a configuration alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from treadle.api.models import LinearSpec
from treadle.errors import CheckpointError, ConfigError, UnsupportedModelError
from treadle_layers_kit.schemes import LinearScheme, check_method, listed_names, stored_alike

FUSED = LinearSpec("mlp.gate_up", ("mlp.gate", "mlp.up"), 8, (8, 8), False, torch.float32)


def test_a_method_that_is_said_or_the_first() -> None:
    assert check_method({"bits": 4}, "awq", "awq_marlin") == "awq"
    assert check_method({"quant_method": "awq_marlin"}, "awq", "awq_marlin") == "awq_marlin"
    with pytest.raises(ConfigError, match="but this checkpoint is quantized with 'gptq'"):
        check_method({"quant_method": "gptq"}, "awq", "awq_marlin")
    with pytest.raises(ConfigError, match="is not quantized; leave the option out"):
        check_method({}, "awq")


@pytest.mark.parametrize("value", ["lm_head", 5, {"lm_head": 1}, ["lm_head", None], True])
def test_what_is_no_list_of_names(value: Any) -> None:
    with pytest.raises(CheckpointError, match="ignore in quantization_config is not a list"):
        listed_names({"ignore": value}, "ignore")


def test_lists_of_names() -> None:
    assert listed_names({"ignore": ["a", "b"]}, "ignore") == ("a", "b")
    assert listed_names({"ignore": None}, "ignore") == listed_names({}, "ignore") == ()


def test_fused_matrices_are_stored_alike() -> None:
    assert stored_alike(FUSED, lambda name: 4) == 4
    assert stored_alike(FUSED, lambda name: None) is None
    with pytest.raises(UnsupportedModelError) as raised:
        stored_alike(FUSED, {"mlp.gate": 4}.get)
    assert str(raised.value).endswith("differently: mlp.gate (4), mlp.up (in full)")


def test_linear_layers_alone() -> None:
    scheme: Any = LinearScheme()
    assert scheme.experts_method(None) is None and scheme.kv_cache_dtype("layer") is None
