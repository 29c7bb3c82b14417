"""Bad files of bitsandbytes are refused while loading, by the tensor and its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_formats.bitsandbytes import FourBitFormat, Int8Format
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.errors import CheckpointError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.models import TinyModel
from treadle.testing.packing import Format, pack_checkpoint

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1}
NAME = "model.layers.0.self_attn.o_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"
Edit = Callable[[dict[str, Tensor]], None]


def put(leaf: str, change: Callable[[Tensor], Tensor]) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{NAME}{leaf}"] = change(tensors[f"{NAME}{leaf}"])

    return edit


def say(**changes: Any) -> Edit:
    def change(state: Tensor) -> Tensor:
        values = {**json.loads(bytes(state.tolist())), **changes}
        return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)

    return put(STATE.removeprefix(NAME), change)


def without(leaf: str) -> Edit:
    return lambda tensors: tensors.__delitem__(f"{NAME}{leaf}")


def first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


NAN, INF = float("nan"), float("inf")
PLAIN = {
    "scale that is NaN": (put(".absmax", first(NAN)), f"{NAME}.absmax"),
    "scale that is infinite": (put(".absmax", first(INF)), f"{NAME}.absmax"),
    "negative scale": (put(".absmax", first(-1.0)), f"{NAME}.absmax"),
    "scales of zero": (put(".absmax", torch.zeros_like), f"{NAME}.absmax"),
    "too few scales": (put(".absmax", lambda t: t[:-1]), f"{NAME}.absmax"),
    "scales of integers": (put(".absmax", lambda t: t.to(torch.int32)), f"{NAME}.absmax"),
    "no scales": (without(".absmax"), NAME),
    "no table": (without(".quant_map"), NAME),
    "another table": (put(".quant_map", lambda t: t.flip(0)), f"{NAME}.quant_map"),
    "short table": (put(".quant_map", lambda t: t[:-1]), f"{NAME}.quant_map"),
    "half the codes": (put("", lambda t: t[: len(t) // 2]), NAME),
    "codes of a type that packs nothing": (put("", lambda t: t.to(torch.int64)), NAME),
    "shape of another matrix": (say(shape=[64, 256]), NAME),
    "shape of one size": (say(shape=[16384]), STATE),
    "odd inputs": (say(shape=[128, 127]), STATE),
    "block of no size": (say(blocksize=48), STATE),
    "no JSON": (put(STATE.removeprefix(NAME), lambda t: t[:-3]), STATE),
    "state that is no object": (
        put(STATE.removeprefix(NAME), lambda t: torch.tensor([49], dtype=torch.uint8)),
        STATE,
    ),
    "state of another kind": (
        lambda tensors: tensors.update({STATE.replace("nf4", "fp4"): tensors.pop(STATE)}),
        NAME,
    ),
    "no state": (without(STATE.removeprefix(NAME)), NAME),
}
DOUBLE = {
    "nested scale that is NaN": (put(".nested_absmax", first(NAN)), f"{NAME}.nested_absmax"),
    "negative nested scale": (put(".nested_absmax", first(-1.0)), f"{NAME}.nested_absmax"),
    "too many nested scales": (
        put(".nested_absmax", lambda t: torch.cat((t, t))),
        f"{NAME}.nested_absmax",
    ),
    "no nested scales": (without(".nested_absmax"), NAME),
    "no nested table": (without(".nested_quant_map"), NAME),
    "nested table of infinity": (put(".nested_quant_map", first(INF)), f"{NAME}.nested_quant_map"),
    "nested blocks of nothing": (say(nested_blocksize=0), STATE),
    "no offset": (say(nested_offset=None), STATE),
}
INT8 = {
    "largest number that is NaN": (put("", lambda t: t), f"{NAME.removesuffix('weight')}SCB"),
    "order of one kernel": (put("", lambda t: t), f"{NAME}_format"),
    "codes of another type": (put("", lambda t: t.to(torch.uint8)), NAME),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bitsandbytes")
    source = make_checkpoint(folder / "source", **SIZES)
    formats: dict[str, Format] = {
        "plain": FourBitFormat(),
        "double": FourBitFormat(double=True),
        "int8": Int8Format(),
    }
    for name, format in formats.items():
        pack_checkpoint(source, folder / name, folder / f"{name} plain", format)
    return {name: folder / name for name in formats}


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        *(("plain", problem) for problem in PLAIN),
        *(("double", problem) for problem in DOUBLE),
        *(("int8", problem) for problem in INT8),
    ],
)
def test_bad_files_are_refused(
    tmp_path: Path, checkpoints: dict[str, Path], kind: str, problem: str
) -> None:
    edit, culprit = {**PLAIN, **DOUBLE, **INT8}[problem]
    tensors = load_file(checkpoints[kind] / "model.safetensors")
    if culprit.endswith("SCB"):
        tensors[culprit] = first(NAN)(tensors[culprit])
    if culprit.endswith("_format"):
        tensors[culprit] = torch.tensor(2, dtype=torch.uint8)
    edit(tensors)
    (tmp_path / "config.json").write_bytes((checkpoints[kind] / "config.json").read_bytes())
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        TinyModel(tmp_path, PluginManager())
    assert f"{culprit} " in str(raised.value) and "model.safetensors" in str(raised.value)
