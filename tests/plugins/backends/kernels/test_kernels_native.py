"""treadle-kernels-native against torch: whole models, on every instruction set."""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from treadle_kernels_native import library, treadle_quantization
from treadle_kernels_native.structs import Format, InstructionSet, Linear, Model

from treadle.api.cache import DeviceInfo
from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.config import from_options
from treadle.engine.core import EngineCore
from treadle.errors import ConfigError, PluginLoadError, UnsupportedModelError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint

# Where there is a compiler, a library that was not built is a failure of the build hook.
if library.missing_reason() is not None and shutil.which("cc") is None:
    pytest.skip(str(library.missing_reason()), allow_module_level=True)

LIBRARY = library.load_library()
SETS = library.instruction_sets(LIBRARY)
BEST = SETS[-1]
SIZES: dict[str, Any] = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 160}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "vocab_size": 331}),
    "llama, one kv head, tied": (
        "LlamaForCausalLM",
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama 3 rope": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen 2": ("Qwen2ForCausalLM", {}),
    "qwen 3": ("Qwen3ForCausalLM", {"head_dim": 64, "tie_word_embeddings": True}),
    "mistral, windows": ("MistralForCausalLM", {"sliding_window": 40}),
}
PROMPTS = [(1, 9), (5, 20), (70, 12), (17, 30), (150, 10), (200, 8)]
"""Tokens of each prompt, and of its answer: chunks, pages and blocks of keys begin everywhere."""


# ------------------------------------------------------------------------------------ whole models


def core(folder: Path, *, native: bool = True, isa: str = "auto", **options: Any) -> EngineCore:
    values: dict[str, Any] = {"max_num_batched_tokens": 96, "num_pages": 200, "max_model_len": 256}
    values |= {"model": str(folder), "device": "cpu", "dtype": "float32", "cpu_threads": 2}
    if native:
        values["plugin_options"] = {"kernel_ops:native": {"isa": isa}}
    else:
        values["disable_plugin"] = ["kernel_ops:native"]
    config = from_options(**values | options)
    return EngineCore(config, PluginManager(config.plugins))


def answers(engine: EngineCore, rounds: int = 1, **parameters: Any) -> dict[str, list[int]]:
    """The tokens of ``PROMPTS``; of a second round, pages of the first one are shared."""
    result: dict[str, list[int]] = {}
    values = {"temperature": 0, "ignore_eos": True, **parameters}
    for number in range(rounds):
        for index, (length, count) in enumerate(PROMPTS):
            ids = [(7 * position + 3 * index) % 250 for position in range(length)]
            params = SamplingParams(max_tokens=count, **values)
            engine.add_request(EngineRequest(f"{number}.{index}", ids, params, 0.0))
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                result.setdefault(output.id, []).extend(output.token_ids)
    engine.close()
    return result


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, changes = request.param
    return make_checkpoint(tmp_path_factory.mktemp("model"), architecture, **SIZES | changes)


def test_tokens_equal_those_of_torch(checkpoint: Path) -> None:
    """Chunks of prompts, many rows, windows and shared pages; on every instruction set."""
    expected = answers(core(checkpoint, native=False), rounds=2)
    for isa in SETS:
        engine = core(checkpoint, isa=isa.name.lower())
        assert any("native" in line for line in engine.info.report), engine.info.report
        assert answers(engine, rounds=2) == expected, isa


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system lists no mappings")
@pytest.mark.parametrize("native", [True, False])
def test_only_native_weights_stay_in_the_mapped_file(tmp_path: Path, native: bool) -> None:
    folder = make_checkpoint(tmp_path, **SIZES)
    engine = core(folder, native=native)
    mapped = str(folder / "model.safetensors") in Path("/proc/self/maps").read_text()
    engine.close()
    assert mapped is native


def mappings() -> list[tuple[int, int, int]]:
    """The first and last address of each mapping of this process, and its bytes on large pages."""
    found = []
    for block in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if block:
            first, last = (int(n, 16) for n in block.split(maxsplit=1)[0].split("-"))
            large = int(block.partition("AnonHugePages:")[2].split()[0]) * 1024
            found.append((first, last, large))
    return found


def can_move_to_large_pages() -> bool:
    """Whether this system moves memory to large pages when it is asked."""
    weight = torch.ones(2 << 20)
    start = -(-weight.data_ptr() // (2 << 20)) * (2 << 20)
    libc = ctypes.CDLL(None)
    return sys.platform == "linux" and not libc.madvise(ctypes.c_void_p(start), 2 << 20, 25)


@pytest.mark.skipif(not can_move_to_large_pages(), reason="the system has no large pages")
def test_weights_move_to_large_pages_and_stay_as_they_are() -> None:
    # Memory that no test before has asked large pages for.
    memory = mmap.mmap(-1, 20 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    weight = torch.frombuffer(memory, dtype=torch.float32, count=4096 * 1024).normal_()
    expected, address = weight.clone(), weight.data_ptr()
    # Its mapping may hold other memory, too, and is divided where large pages are asked for.
    ((first, last, before),) = [found for found in mappings() if found[0] <= address < found[1]]
    model = Model(hidden=1024, heads=4, kv_heads=2, head_size=64, intermediate=512, page_size=16)
    model.head = Linear(weight=address, n=4096, k=1024, format=Format.FLOAT32)
    handle = LIBRARY.tn_create(ctypes.byref(model), 1, BEST, 0)
    moved = sum(large for begin, end, large in mappings() if begin < last and end > first) - before
    LIBRARY.tn_destroy(handle)
    # At least one of the six to eight that it spans: a machine whose memory is in pieces has no more.
    assert moved >= 2 << 20
    assert torch.equal(weight, expected)


def test_logprobs_do_not_depend_on_other_requests(tmp_path: Path) -> None:
    """In float32 they are equal bit by bit, and wherever prompts are cut."""
    folder = make_checkpoint(tmp_path, "MistralForCausalLM", sliding_window=40, **SIZES)

    def logprobs(prompts: list[int], **options: Any) -> list[float]:
        engine, values = core(folder, **options), []
        for index in prompts:
            ids = [(7 * position + 3 * index) % 250 for position in range(PROMPTS[index][0])]
            params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
            engine.add_request(EngineRequest(str(index), ids, params, 0.0))
        while engine.has_work:
            for output in engine.step():
                if output.id == "4":
                    values += [value for token in output.logprobs or () for value in token.logprobs]
        engine.close()
        return values

    alone = logprobs([4], enable_prefix_caching=False)
    assert len(alone) == 12
    assert logprobs([0, 1, 2, 3, 4, 5]) == alone
    assert logprobs([4], max_num_batched_tokens=37) == alone


@pytest.mark.parametrize(("quantization", "error"), [("auto", 0.12), ("int8", 0.25), ("int4", 0.6)])
def test_logprobs_of_rounded_weights_are_near(
    tmp_path: Path, quantization: str, error: float
) -> None:
    """Of the most probable tokens behind a prompt, on every instruction set, compared with float32; those
    of weights in four bits, which are far from it, with torch on the same weights."""
    four = quantization == "int4"
    # So large that a piece of work has several panels of rows, and a row several parts.
    sizes = SIZES | {"head_dim": 64, "intermediate_size": 1152, "hidden_size": 128 if four else 96}
    folder = make_checkpoint(tmp_path, "Qwen3ForCausalLM", **sizes)

    def logprobs(**options: Any) -> dict[int, float]:
        engine = core(folder, **options)
        assert not options.get("native", True) or any("native" in s for s in engine.info.report)
        ids = [(11 * position) % 250 for position in range(100)]
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=10, ignore_eos=True)
        engine.add_request(EngineRequest("it", ids, params, 0.0))
        values: dict[int, float] = {}
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                for token in output.logprobs or ():
                    values |= zip(token.ids, token.logprobs, strict=True)
        engine.close()
        return values

    expected = logprobs(native=False, **({"quantization": "int4"} if four else {}))
    for isa in SETS:
        options = {"dtype": "bfloat16", "page_size": 16, "quantization": quantization}
        actual = logprobs(isa=isa.name.lower(), **options)
        common = set(actual) & set(expected)  # those at the edge of the ten may change places
        assert len(common) >= 7
        assert max(abs(actual[token] - expected[token]) for token in common) < error


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_it_refuses_what_it_is_not_for(method: str) -> None:
    hook: Any = treadle_quantization
    assert hook(method="int3", checkpoint={}, device=DeviceInfo("cpu")) is None
    with pytest.raises(UnsupportedModelError, match="quantization_config of its own"):
        hook(method=method, checkpoint={"bits": 4}, device=DeviceInfo("cpu"))
    with pytest.raises(UnsupportedModelError, match="made for CPUs; on 'cuda' use 'fp8'"):
        hook(method=method, checkpoint={}, device=DeviceInfo("cuda", (9, 0)))


def test_sampling_and_prompt_logprobs_are_those_of_torch(tmp_path: Path) -> None:
    """A step whose prompt's logprobs are asked for runs in torch, on the same weights and cache."""
    folder = make_checkpoint(tmp_path, **SIZES)
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "prompt_logprobs": 1}
    expected = answers(core(folder, native=False), **options)
    assert answers(core(folder), **options) == expected


def test_a_model_of_another_form_runs_in_torch_and_says_why(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, **SIZES, hidden_act="gelu")
    engine = core(folder)
    (line,) = (line for line in engine.info.report if "layer by layer" in line)
    assert "layer 0: the activation of the MLP is not silu" in line
    assert answers(engine) == answers(core(folder, native=False))


def test_without_the_library_the_engine_runs_in_torch_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, **SIZES)
    monkeypatch.setattr(library, "LIBRARY_NAME", "not-built.so")
    engine = core(folder)
    assert any("neither a C compiler" in line for line in engine.info.report), engine.info.report
    engine.close()


def test_an_instruction_set_that_the_machine_lacks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, before weights are loaded; and the library itself makes no engine that would crash."""
    folder = make_checkpoint(tmp_path, **SIZES)
    monkeypatch.setattr(library, "instruction_sets", lambda _: [InstructionSet.GENERIC])
    with pytest.raises(
        PluginLoadError, match="'avx2', which this machine lacks; its best is 'generic'"
    ):
        core(folder, isa="avx2")
    assert answers(core(folder, isa="auto")) == answers(core(folder, native=False))
    with pytest.raises(ConfigError, match="isa"):
        core(folder, isa="sse9")
    model = Model(hidden=32, heads=1, kv_heads=1, head_size=32, intermediate=32, page_size=16)
    for isa in (-1, max(InstructionSet) + 1, *set(InstructionSet) - set(SETS)):
        assert LIBRARY.tn_create(ctypes.byref(model), 1, isa, 0) is None


def test_steps_are_sound_under_sanitizers(tmp_path: Path) -> None:
    """Addresses and undefined behaviour, with every buffer on its own, on every instruction set."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no cc to build the library with sanitizers")
    sources = Path(library.__file__).parent / "csrc"
    if not sources.is_dir():
        pytest.skip("the sources of the library are not beside it: it was not installed editable")
    flags = ["-std=gnu11", "-O1", "-w", "-pthread", "-fsanitize=address,undefined"]
    flags += ["-fno-sanitize-recover=undefined", "-I", str(sources), "-o", str(tmp_path / "steps")]
    files = [str(Path(__file__).with_name("native_steps.c")), *map(str, sources.glob("*.c"))]
    built = subprocess.run([compiler, *flags, *files, "-lm"], capture_output=True, text=True)
    if built.returncode != 0 and "asan" in built.stderr:
        pytest.skip("this cc has no libraries of sanitizers")
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(tmp_path / "steps")], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, f"sound to {BEST}\n"), run.stderr[-4000:]


def test_the_build_asks_for_a_compiler_only_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(library.__file__).parents[1]
    if not (folder / "pyproject.toml").is_file():
        pytest.skip("the distribution was not installed editable")
    from hatchling import build

    monkeypatch.chdir(folder)
    monkeypatch.setenv("CC", sys.executable)  # any program that exists
    assert build.get_requires_for_build_wheel() == []
    monkeypatch.setenv("CC", str(folder / "no-compiler"))
    (requirement,) = build.get_requires_for_build_wheel()
    assert requirement.startswith("ziglang")
