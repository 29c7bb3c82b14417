"""treadle-gguf: the blocks of every type, whole files, and files that are refused."""

from __future__ import annotations

import hashlib
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_formats.gguf_blocks import GgufFormat
from quantized_formats.gguf_file import convert, write_file
from torch import Tensor
from treadle_gguf import conversion
from treadle_gguf.blocks import PLACES, dequantize, dequantize_rows, levels
from treadle_gguf.conversion import checkpoint_files
from treadle_gguf.reader import read_header
from treadle_gguf.types import FLOATS, TYPES, TYPES_BY_NUMBER

from treadle import LLM, SamplingParams
from treadle.errors import CheckpointError, PluginNotFoundError, RequestError, TreadleError
from treadle.loading import fetch, parse_ref
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.linears import Layer
from treadle.testing.models import TinyModel
from treadle.testing.plugin import PluginSuite
from treadle.testing.quantization import QuantizationSuite

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"types": {"*": "IQ1_S"}}, "'IQ1_S'"),
    "no types": ({"types": None}, "gguf"),
    "no file": ({"file": None}, "gguf"),
    "another method": ({"quant_method": "squeezellm"}, "'squeezellm'"),
}


class TestSmallBlocks(PluginSuite, QuantizationSuite):
    plugin = "quantization:gguf"
    formats = {type: GgufFormat(type) for type in ("Q4_0", "Q5_1", "IQ4_NL")}
    refused = REFUSED


class TestLargeBlocks(PluginSuite, QuantizationSuite):
    """Blocks of 256, which the inputs of every layer and rank must hold whole."""

    plugin = "quantization:gguf"
    formats = {"Q6_K": GgufFormat("Q6_K")}
    refused = REFUSED
    model = {**QuantizationSuite.model, "hidden_size": 256, "intermediate_size": 512}

    @property
    def layers(self) -> dict[str, Layer]:
        return {
            "plain": Layer(256, (128,)),
            "fused": Layer(512, (128, 64, 32), bias=True),
        }

    @property
    def shared(self) -> dict[str, Layer]:
        return {
            "columns": Layer(256, (256,), bias=True, split="column"),
            "rows": Layer(512, (128,), bias=True, split="row"),
        }


# What the gguf package (0.19) reads from blocks of hashed bytes: a weighted sum, and some numbers.
GOLDEN = {
    "Q4_0": (-2.375, [0.25, 0.875, -1.0, 0.625, -3.5, -0.5, 1.0, -3.0]),
    "Q4_1": (-178.0, [2.0, 1.625, 1.5, 3.0, -2.5, -2.5, -1.5, -5.5]),
    "Q5_0": (-12.125, [-1.375, -0.625, -1.875, -0.125, 4.5, -4.0, -5.5, -3.0]),
    "Q5_1": (-551.0, [4.75, 1.5, 1.375, 3.0, 0.5, -7.5, -15.0, -9.5]),
    "Q8_0": (-477.875, [-11.125, 13.25, 2.75, -8.625, -40.5, 3.0, 2.0, 54.0]),
    "Q2_K": (-16306.625, [-6.375, -9.375, -14.75, -0.625, -12.0, -19.0, -4.5, -9.5]),
    "Q3_K": (-6933.25, [-2.0, 13.0, -4.0, -0.0, 17.0, -1.5, -23.0, -4.5]),
    "Q4_K": (-126147.625, [-37.25, -30.5, -24.375, 19.125, -103.0, -33.5, -360.5, -119.0]),
    "Q5_K": (-333601.25, [5.875, 46.125, -36.125, -41.875, -18.5, -63.0, -168.0, -420.0]),
    "Q6_K": (-16002.625, [-20.625, 453.375, -258.875, 92.75, 797.5, 425.0, -289.0, -90.0]),
    "IQ4_NL": (71.5, [-6.125, 11.125, -8.125, -15.875, 24.5, 41.5, -6.5, 11.0]),
    "IQ4_XS": (-14361.375, [-0.625, -178.75, -113.0, -171.5, 490.0, -996.0, 66.0, 1582.0]),
}


def hashed_blocks(type: str) -> Tensor:
    size = TYPES[type][1]
    pieces = (hashlib.sha256(f"{type} {i}".encode()).digest() for i in range(2 * size // 32 + 1))
    blocks = torch.frombuffer(bytearray(b"".join(pieces)[: 2 * size]), dtype=torch.uint8)
    blocks = blocks.view(2, size).clone()
    for index, place in enumerate(PLACES[type]):
        numbers = torch.tensor([[0.125 + index], [-0.5 + index]], dtype=torch.float16)
        blocks[:, place : place + 2] = numbers.view(torch.uint8)
    return blocks


def test_no_type_is_left_out() -> None:
    assert set(GOLDEN) == set(TYPES) - set(FLOATS)


@pytest.mark.parametrize("type", GOLDEN)
def test_numbers_are_those_of_the_gguf_package(type: str) -> None:
    numbers = dequantize(hashed_blocks(type), type, levels()).flatten()
    total, some = GOLDEN[type]
    weights = 1 + torch.arange(len(numbers)) % 7
    assert float((numbers.double() * weights).sum()) == total
    assert numbers[:: len(numbers) // 8 + 1].tolist() == some


@pytest.mark.parametrize("type", GOLDEN)
def test_every_block_is_read_as_the_gguf_package_does(type: str) -> None:
    gguf = pytest.importorskip("gguf", reason="compares with the gguf package itself")
    number = next(n for n, name in TYPES_BY_NUMBER.items() if name == type)
    generator = torch.Generator().manual_seed(number)
    blocks = torch.randint(256, (500, TYPES[type][1]), generator=generator).to(torch.uint8)
    for place in PLACES[type]:
        scale = torch.randn(500, 1, generator=generator).half()
        blocks[:, place : place + 2] = scale.view(torch.uint8)
    expected = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(number))
    torch.testing.assert_close(dequantize(blocks, type, levels()), torch.from_numpy(expected))


# ---------------------------------------------------------------------------- whole files

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
MIXED = {"*": "Q4_0", "attn_v": "Q8_0", "ffn_down": "Q6_K", "token_embd": "Q5_1", "output": "Q6_K"}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "What is it?"}]
OPTIONS: dict[str, Any] = {"device": "cpu", "num_pages": 64, "max_num_seqs": 4, "cpu_threads": 1}


def answers(model: Path, cache: Path) -> list[Any]:
    with LLM(str(model), dtype="float32", download_dir=str(cache), **OPTIONS) as llm:
        outputs = llm.generate(["Once upon a time", "é<|x"], GREEDY, use_tqdm=False)
        outputs += llm.chat(MESSAGES, GREEDY, use_tqdm=False)
        return [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].text) for o in outputs]


@pytest.mark.parametrize(
    ("architecture", "types"),
    [
        ("LlamaForCausalLM", MIXED),
        ("Qwen2ForCausalLM", {"*": "Q5_0", "attn_k": "F16", "output": "F32"}),
        ("Qwen3ForCausalLM", {"*": "IQ4_NL", "attn_q": "F32"}),
        ("Qwen3MoeForCausalLM", {"*": "Q8_0", "ffn_gate_inp": "F32"}),
    ],
)
def test_one_file_is_the_model_with_its_numbers(
    tmp_path: Path, architecture: str, types: dict[str, str]
) -> None:
    """Tokens of prompts and of chats: configuration, tokenizer and chat template are the file's."""
    sizes = {**SIZES, "moe_intermediate_size": 64} if "Moe" in architecture else SIZES
    source = make_checkpoint(tmp_path / "source", architecture, tokenizer=True, **sizes)
    file = tmp_path / "model.GGUF"
    convert(source, file, tmp_path / "plain", types)
    expected = answers(tmp_path / "plain", tmp_path)
    assert answers(file, tmp_path) == expected
    assert answers(source, tmp_path) != expected, "nothing is lost, so this shows nothing"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("good")
    sizes = {**SIZES, "num_hidden_layers": 1}
    source = make_checkpoint(folder / "source", "LlamaForCausalLM", tokenizer=True, **sizes)
    convert(source, folder / "model.gguf", folder / "plain", {"*": "Q8_0"})
    return (folder / "model.gguf").read_bytes()


@pytest.mark.parametrize("key", [b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges"])
def test_a_file_whose_tokenizer_is_missing_or_damaged(
    good: bytes, tmp_path: Path, key: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "odd.gguf"
    file.write_bytes(good.replace(key, key[:-1] + b"?"))
    options = {**OPTIONS, "download_dir": str(tmp_path)}
    for _ in range(2):  # the second time the folder of the file is there
        caplog.clear()
        with LLM(str(file), **options) as llm:
            assert "unless the option tokenizer gives one" in caplog.text
            output = llm.generate({"prompt_token_ids": [5, 6]}, GREEDY, use_tqdm=False)[0]
            assert len(output.outputs[0].token_ids) == 12
            with pytest.raises(RequestError, match="no tokenizer"):
                llm.generate("Once", GREEDY, use_tqdm=False)
    other = make_checkpoint(tmp_path / "other", "LlamaForCausalLM", tokenizer=True, **SIZES)
    with LLM(str(file), tokenizer=str(other), **options) as llm:
        assert llm.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0].text


def test_a_tokenizer_that_can_be_read_now_is_added(
    good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an update of the library that reads it."""
    file = tmp_path / "model.gguf"
    file.write_bytes(good)
    ref = parse_ref(str(file), download_dir=str(tmp_path))

    def unreadable(header: object) -> str:
        raise CheckpointError("no reader")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_tokenizer", unreadable)
        folder = fetch(PluginManager(), ref).root
    assert not (folder / "tokenizer.json").exists()
    assert fetch(PluginManager(), ref).root == folder
    assert (folder / "tokenizer.json").is_file() and (folder / "tokenizer_config.json").is_file()


@pytest.mark.parametrize("shape", [(3,), (5, 2), (2500, 2), (2, 3, 2), (0, 2)])
def test_tensors_of_any_shape_are_dequantized_by_rows(shape: tuple[int, ...]) -> None:
    blocks = torch.randint(256, (*shape, TYPES["Q8_0"][1])).to(torch.uint8)
    blocks[..., :2] = torch.tensor([0.5]).half().view(torch.uint8)
    expected = dequantize(blocks, "Q8_0", levels()).flatten(-2)
    assert torch.equal(dequantize_rows(blocks, "Q8_0", levels()), expected)


@pytest.mark.parametrize("size", [0, 3, 4, 20, 500, 8000, -1, -40_000])
def test_a_file_that_is_cut_off(good: bytes, tmp_path: Path, size: int) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(good[:size])
    with pytest.raises(CheckpointError, match=r"cut\.gguf .*cannot be read as GGUF"):
        fetch(PluginManager(), parse_ref(str(file), download_dir=str(tmp_path)))


def test_bytes_at_random_end_in_an_error_or_a_header(good: bytes, tmp_path: Path) -> None:
    import random

    random.seed(3)
    file = tmp_path / "odd.gguf"
    for attempt in range(150):
        data = bytearray(good)
        for _ in range(random.randint(1, 4)):
            data[random.randrange(4000)] = random.randrange(256)
        file.write_bytes(data)
        try:
            header = read_header(file)
            if attempt % 5 == 0:
                checkpoint_files(header)
        except TreadleError as error:
            assert "odd.gguf" in str(error)


@pytest.mark.parametrize(
    ("place", "data", "words"),
    [(0, b"GGML", "does not begin"), (4, struct.pack("<I", 1), "version is 1")],
)
def test_what_is_no_gguf(good: bytes, tmp_path: Path, place: int, data: bytes, words: str) -> None:
    file = tmp_path / "other.gguf"
    file.write_bytes(good[:place] + data + good[place + len(data) :])
    with pytest.raises(CheckpointError, match=words):
        read_header(file)


def test_architectures_that_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "mamba.gguf"
    write_file(file, {"general.architecture": "mamba"}, {})
    with pytest.raises(TreadleError, match="'mamba'; treadle-gguf reads llama, qwen2"):
        fetch(PluginManager(), parse_ref(str(file), download_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("stored_name", "name"),
    [("blk.0.attn_v.weight", "v_proj"), ("token_embd.weight", "token_embd.weight")],
)
@pytest.mark.parametrize("is_nan", [True, False])
def test_scales_that_are_nan_or_nothing(
    good: bytes, tmp_path: Path, stored_name: str, name: str, is_nan: bool
) -> None:
    file = tmp_path / "nan.gguf"
    file.write_bytes(good)
    info = read_header(file).tensors[stored_name]
    data = bytearray(good)
    if is_nan:
        data[info.start : info.start + 2] = b"\xff\x7f"
    else:
        data[info.start : info.start + info.num_bytes] = bytes(info.num_bytes)
    file.write_bytes(data)
    files = fetch(PluginManager(), parse_ref(str(file), download_dir=str(tmp_path)))
    words = "scales that are NaN" if is_nan else "no scale but 0"
    with pytest.raises(CheckpointError, match=rf"{name} in .*nan\.gguf has {words}"):
        TinyModel(files.root, PluginManager())


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/models/a.gguf", "/models/a.gguf"),
        ("./a.GGUF", "a.GGUF"),
        ("a.gguf", "a.gguf"),
        ("gguf:a.gguf", "a.gguf"),
        ("file:///models/a.gguf", "/models/a.gguf"),
        ("org/name/a-Q4_K_M.gguf", "org/name/a-Q4_K_M.gguf"),
        ("hf:org/name/a.gguf", "org/name/a.gguf"),
    ],
)
def test_names_of_files(text: str, path: str) -> None:
    ref = parse_ref(text, "main")
    assert (ref.scheme, ref.path, ref.revision) == ("gguf", path, "main")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no file .*none\.gguf; give a \.gguf file"):
        fetch(PluginManager(), parse_ref(str(tmp_path / "none.gguf")))


def test_a_file_of_a_repository(
    good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the hub's cache, as it is after a download; the hub itself is not reached."""
    import huggingface_hub

    commit, hub = "0" * 40, tmp_path / "models--org--name"
    snapshot = hub / "snapshots" / commit / "sub"
    snapshot.mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(commit)
    (snapshot / "a.gguf").write_bytes(good)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    ref = parse_ref("org/name/sub/a.gguf", download_dir=str(tmp_path))
    files = fetch(PluginManager(), ref)
    assert files.config["num_hidden_layers"] == 1 and "tokenizer.json" in files.names
    with pytest.raises(CheckpointError, match=r"b\.gguf of org/name could not be downloaded"):
        fetch(PluginManager(), parse_ref("org/name/b.gguf", download_dir=str(tmp_path)))


def test_a_checkpoint_that_names_a_file_of_others(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(good)
    files = fetch(PluginManager(), parse_ref(str(tmp_path / "a.gguf"), download_dir=str(tmp_path)))
    copied = shutil.copytree(files.root, tmp_path / "copied")
    with pytest.raises(CheckpointError, match="not made from a GGUF file"):
        TinyModel(copied, PluginManager())
    TinyModel(files.root, PluginManager())


def test_without_the_plugin_it_is_named(tmp_path: Path) -> None:
    from treadle.config import PluginConfig

    plugins = PluginManager(PluginConfig(disable_plugin=("treadle-gguf",)))
    with pytest.raises(PluginNotFoundError, match="gguf") as raised:
        fetch(plugins, parse_ref(str(tmp_path / "a.gguf")))
    assert "is a file, not a folder" not in str(raised.value)
