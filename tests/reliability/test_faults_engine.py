"""Faults inside of an engine: memory that runs out, clocks that jump, checkpoints that are damaged.

``fault_seed`` moves the moment and the place. ``faults.toml`` names the rows.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle import LLM, SamplingParams
from treadle.errors import TreadleError
from treadle.runner import model_runner

sys.path.append(str(Path(__file__).parents[1] / "server"))
from scripted import ScriptedEngine
from serving import serving

PROMPTS = [[5, 9, 20], [7] * 30, [11, 12], [40, 41, 42, 43]]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "num_pages": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from treadle.testing.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **OPTIONS) as llm:
        yield llm


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def reference(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for answer in answers(llm)]


def check(llm: LLM, reference: list[list[int]]) -> None:
    assert [answer.token_ids for answer in answers(llm)] == reference
    stats = llm.stats
    assert stats.num_running == stats.num_waiting == stats.num_used_pages == 0
    assert stats.integrity_faults == 0


def failing(function: Callable[..., Any], call: int, error: Exception) -> Callable[..., Any]:
    """``function``, whose call of this number raises."""
    numbers = itertools.count()

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == call:
            raise error
        return function(*args, **kwargs)

    return wrapper


SITES: dict[str, tuple[Any, str]] = {
    "slots": (model_runner.ModelRunner, "_update_slots"),
    "inputs": (model_runner, "build_inputs"),
    "forward": (model_runner.ModelRunner, "_launch_eager"),
    "logits": (model_runner.ModelRunner, "_logits"),
    "sample": (model_runner.ModelRunner, "_sample"),
}


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("site", SITES)
def test_memory_that_runs_out_in_a_step(
    llm: LLM, reference: list[list[int]], site: str, error: type[Exception], fault_seed: int
) -> None:
    """Its requests fail with the reason and without a wrong token; the engine goes on."""
    owner, name = SITES[site]
    call = random.Random(f"{fault_seed} {site}").randrange(12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), call, error("there is no more")))
        got = answers(llm)
    assert any(answer.finish_reason == "error" for answer in got)
    for answer, expected in zip(got, reference, strict=True):
        assert answer.token_ids == expected[: len(answer.token_ids)]
        assert answer.finish_reason == "length" or "memory" in answer.error.lower()
    check(llm, reference)


def jumping_clock(seed: int) -> Callable[[], float]:
    """A wall clock that is set forwards and back by up to a day with each look at it."""
    draw, real = random.Random(seed), time.time
    return lambda: real() + draw.uniform(-86_400, 86_400)


def test_a_clock_that_jumps_does_not_concern_the_engine(
    llm: LLM, reference: list[list[int]], fault_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = llm.stats.step_seconds
    monkeypatch.setattr(time, "time", jumping_clock(fault_seed))
    check(llm, reference)
    assert 0 < llm.stats.step_seconds - before < 3600


async def test_a_clock_that_jumps_ends_no_request(
    fault_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", jumping_clock(fault_seed))
    async with serving(ScriptedEngine(), request_timeout=60.0, hang_timeout=60.0) as server:
        for stream in (False, True) * 3:
            response = await server.complete(stream=stream, max_tokens=8)
            assert response.status_code == 200 and "error" not in response.text
        assert (await server.client.get("/health")).status_code == 200
        page = (await server.client.get("/metrics")).text
    sums = [line for line in page.splitlines() if "_sum" in line and not line.startswith("#")]
    assert sums and all(0 <= float(line.split()[-1]) < 3600 for line in sums)


def opened(folder: Path) -> list[list[int]] | None:
    """The answers of a checkpoint, ``None`` if it is refused in words for the user."""
    try:
        with LLM(str(folder), **OPTIONS) as llm:
            return [answer.token_ids for answer in answers(llm)]
    except TreadleError as error:
        assert str(error)
        return None


def test_weights_that_are_damaged(
    model: Path, reference: list[list[int]], tmp_path: Path, fault_seed: int
) -> None:
    """A file that is cut, and one whose header is another: refused, or read as it was."""
    draw = random.Random(fault_seed)
    folder = shutil.copytree(model, tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    sound = file.read_bytes()
    size = 8 + int.from_bytes(sound[:8], "little")
    file.write_bytes(sound[: draw.randrange(len(sound))])
    assert opened(folder) is None
    for _ in range(3):
        damaged = bytearray(sound)
        damaged[draw.randrange(size)] = draw.randrange(256)
        file.write_bytes(damaged)
        assert opened(folder) in (None, reference)
    header = json.loads(sound[8:size])
    names = sorted(name for name in header if name != "__metadata__")
    one, other = draw.sample(names, 2)
    numel = math.prod(header[one]["shape"])
    for change in (
        {one: {**header[one], "dtype": "I32"}},
        {one: {**header[one], "shape": [2, numel // 2]}},
        {one: {**header[one], "data_offsets": header[other]["data_offsets"]}},
    ):
        text = json.dumps({**header, **change}).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + sound[size:])
        assert opened(folder) is None


ODD_VALUES: tuple[Any, ...] = (-1, 0, 3, 10**9, 10**30, 1.5, float("nan"), "x", None, [], {}, True)
FIELDS = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "hidden_act",
    "head_dim",
    "tie_word_embeddings",
    "torch_dtype",
    "eos_token_id",
    "architectures",
    "model_type",
    "quantization_config",
)


def test_configurations_that_are_nonsense(model: Path, tmp_path: Path, fault_seed: int) -> None:
    """Refused in words for the user, or read as far as they make sense."""
    draw = random.Random(fault_seed)
    folder = shutil.copytree(model, tmp_path / "model")
    sound = json.loads((folder / "config.json").read_text())
    for _ in range(10):
        field, value = draw.choice(FIELDS), draw.choice(ODD_VALUES)
        (folder / "config.json").write_text(json.dumps({**sound, field: value}))
        try:
            opened(folder)
        except Exception as error:
            raise AssertionError(f"{field} is {value!r}: {type(error).__name__}") from error
