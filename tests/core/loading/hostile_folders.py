"""Ways to make a checkpoint's folder hostile, and what is said about each."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ("MUTATIONS", "Mutation")

Mutation = tuple[Callable[[Path], object], str]
"""What is done to a folder, and the pattern of the error."""

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PIPE = "cannot read .*{}: it is a named pipe, not a regular file"
OUTSIDE = r"{} is a link to /\S*, outside of the checkpoint's folder"


def edit(**changes: Any) -> Callable[[Path], object]:
    """Change ``config.json``."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def write(name: str, text: str | bytes) -> Callable[[Path], object]:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: replaced(folder / name).write_bytes(data)


def pipe(name: str) -> Callable[[Path], object]:
    return lambda folder: os.mkfifo(replaced(folder / name))


def link(name: str, target: str) -> Callable[[Path], object]:
    return lambda folder: replaced(folder / name).symlink_to(target)


def sparse(name: str, size: int) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        with replaced(folder / name).open("wb") as file:
            file.truncate(size)

    return make


def unix_socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(folder, os.O_RDONLY)
        replaced(folder / "config.json")
        bound.bind(f"/proc/self/fd/{here}/config.json")
        os.close(here)


def replaced(path: Path) -> Path:
    """``path`` without what was there."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    return path


def folder_as(name: str) -> Callable[[Path], object]:
    return lambda folder: replaced(folder / name).mkdir()


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change the header of the weights and leave their bytes."""

    def rewrite(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + length])
        change(table)
        store(folder, json.dumps(table).encode(), data[8 + length :])

    return rewrite


def store(folder: Path, table: bytes, data: bytes) -> None:
    (folder / WEIGHTS).write_bytes(len(table).to_bytes(8, "little") + table + data)


def tensor(**changes: Any) -> Callable[[Path], object]:
    """Change what the header says of one tensor."""
    return header(lambda table: table["model.norm.weight"].update(changes))


def shift(start: int, stop: int) -> Callable[[Path], object]:
    """Move the bytes of one tensor."""

    def change(table: dict[str, Any]) -> None:
        entry = table["model.norm.weight"]
        a, b = entry["data_offsets"]
        entry["data_offsets"] = [a + start, b + stop]

    return header(change)


def repeat(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = data[8 : 8 + length].decode().strip()
    entry = json.dumps({"model.norm.weight": json.loads(table)["model.norm.weight"]})
    store(folder, f"{table[:-1]},{entry[1:]}".encode(), data[8 + length :])


def many_tensors(folder: Path) -> None:
    """A header as long as that of a million tensors with the shortest descriptions."""
    with (folder / WEIGHTS).open("wb") as file:
        file.write((55 * 10**6).to_bytes(8, "little") + b"{")
        file.truncate(56 * 10**6)


def long_header(folder: Path) -> None:
    with (folder / WEIGHTS).open("wb") as file:
        file.write((10**12).to_bytes(8, "little") + b"{}")


def index(table: dict[str, str]) -> Callable[[Path], object]:
    return write(INDEX, json.dumps({"weight_map": table}))


def tokenizer(**parts: Any) -> Callable[[Path], object]:
    """Change parts of ``tokenizer.json``."""

    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | parts))

    return change


def space_to(text: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": " "}, "content": text}


def template(*pieces: str, special: int = 0) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": piece, "type_id": 0}} for piece in pieces]
        + [{"SpecialToken": {"id": "x", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"x": {"id": "x", "ids": [1] * special, "tokens": ["x"] * special}},
    }


def _files() -> Iterator[tuple[str, Mutation]]:
    """What opens badly, for every file that something reads, or might."""
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        WEIGHTS,
        INDEX,
    ):
        yield f"{name} is a pipe", (pipe(name), PIPE.format(name))
        yield f"{name} is elsewhere", (link(name, "/etc/passwd"), OUTSIDE.format(name))
    yield "a device", (link("config.json", "/dev/zero"), OUTSIDE.format("config.json"))
    yield "a socket", (unix_socket, r"config\.json: it is a socket, not a regular file")
    yield "a folder", (folder_as("config.json"), r"config\.json: it is a folder, not a regular")
    yield (
        "itself",
        (link("config.json", "config.json"), r"config\.json: Too many levels of symbolic"),
    )
    yield "nowhere", (link("config.json", "gone.json"), r"config\.json: No such file")
    yield "above", (link("chat_template.jinja", "../../secret.jinja"), "No such file|outside")
    for name, size in (
        ("config.json", 17 << 20),
        ("tokenizer.json", 1 << 40),
        ("chat_template.jinja", 2 << 20),
        (INDEX, 1 << 30),
    ):
        yield f"{name} is large", (sparse(name, size), rf"{name}: it has {size} bytes; such a file")


def _json() -> Iterator[tuple[str, Mutation]]:
    name = "config.json"
    for case, text, problem in (
        ("a key twice", '{"a": {"b": 1, "b": 2}}', "an object has the key 'b' twice"),
        ("NaN", '{"rope_theta": NaN}', "a number is NaN"),
        ("infinity", '{"rope_theta": -Infinity}', "a number is -Infinity"),
        ("too large", '{"rope_theta": 1e999}', "a number is 1e999"),
        ("deep", '{"a": ' * 100 + "1" + "}" * 100, "nested more than 64 levels"),
        ("very deep", "[" * 200_000, "nested more than 64 levels"),
        ("digits", f'{{"a": {"9" * 10_000}}}', r"Exceeds the limit|4300 digits"),
        ("a list", "[]", "holds list, not an object"),
        ("no JSON", "{", "Expecting property name"),
        ("no text", b'{"a": "\xff"}', "invalid start byte"),
    ):
        yield f"JSON: {case}", (write(name, text), f"{name}.*{problem}")
    twice = '{"eos_token": "a", "eos_token": "b"}'
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        yield f"JSON: {name}", (write(name, twice), f"{name}: .*'eos_token' twice")
    yield (
        "JSON: index",
        (write(INDEX, '{"weight_map": {"a": "b", "a": "c"}}'), f"{INDEX}.*'a' twice"),
    )


def _sizes() -> Iterator[tuple[str, Mutation]]:
    for value in (10**12, "12", True, 12.5, -1, 0, 4097, [2, "x"]):
        allowed = r"an integer from 1 to 4096 is allowed: correct config\.json"
        mutation = edit(num_hidden_layers=value)
        yield f"layers: {value!r}", (mutation, f"num_hidden_layers of .*{allowed}")
    for field, value in (
        ("hidden_size", 10**9),
        ("hidden_size", 16.0),
        ("vocab_size", 10**12),
        ("vocab_size", "320"),
        ("intermediate_size", 10**10),
        ("num_attention_heads", 10**9),
        ("num_key_value_heads", True),
        ("head_dim", -4),
        ("num_experts", 10**9),
        ("num_labels", 10**9),
        ("max_position_embeddings", 10**30),
        ("eos_token_id", 10**30),
        ("some_dim", 10**12),
    ):
        yield f"{field}: {value!r}", (edit(**{field: value}), rf"^{field} of \S+ is {value!r}")
    nested = edit(text_config={"num_hidden_layers": 10**12})
    yield "a size within", (nested, "^num_hidden_layers of .* is 1000000000000;")
    yield (
        "more layers",
        (
            edit(num_hidden_layers=3),
            r"num_hidden_layers .* is 3, but its tensors are those of 2 layers \(model\.layers\.0 to "
            r"model\.layers\.1\)",
        ),
    )
    for field in ("hidden_size", "intermediate_size", "vocab_size"):
        problem = (
            r"needs more than \d+ bytes, a tensor \[.*\] among them, but its weight files have"
        )
        yield f"a larger {field}", (edit(**{field: 2**23}), problem)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 2**24}
    yield "larger heads", (edit(**heads), r"needs more than \d+ bytes")


def _weights() -> Iterator[tuple[str, Mutation]]:
    entry = r"model\.safetensors \(\d+ bytes\) cannot be read as safetensors: the tensor 'model.norm.weight' "
    for case, change, problem in (
        ("dtype", tensor(dtype="F16"), r"is F16 \[16\], which is not what 64 bytes hold"),
        ("shape", tensor(shape=[17]), r"is F32 \[17\], which is not what 64 bytes hold"),
        (
            "product",
            tensor(shape=[2**40, 2**40]),
            r"is F32 \[\d+, \d+\], which is not what 64 bytes",
        ),
        ("unknown dtype", tensor(dtype="PICKLE"), "is described by"),
        ("negative shape", tensor(shape=[-4, -4]), "is described by"),
        ("true", tensor(shape=[True, 16]), "is described by"),
        ("no offsets", tensor(data_offsets=[0]), "is described by"),
        ("swapped", tensor(data_offsets=[64, 0]), "which is not what -64 bytes hold"),
        ("overlap", shift(-64, -64), "overlaps the tensor before it|at bytes"),
        ("beyond", shift(2**40, 2**40), "leaves a gap before it"),
    ):
        yield f"header: {case}", (change, problem if case == "overlap" else entry + ".*" + problem)
    file = r"model\.safetensors \(\d+ bytes\) cannot be read as safetensors: "
    drop = header(lambda table: table.pop("model.norm.weight"))
    yield "header: unused bytes", (drop, file + ".*(leaves a gap|follow the header)")
    yield (
        "header: a tensor twice",
        (repeat, file + "an object has the key 'model.norm.weight' twice"),
    )
    yield "header: 10^6 tensors", (many_tensors, file + r"its header has \d+ bytes; it may have")
    yield "header: 10^12 bytes", (long_header, file + "its header is longer than the file")
    outside = "weight_map points outside the checkpoint"
    for target in ("../x.safetensors", "/etc/passwd", "a/../../x"):
        yield f"index: {target}", (index({"a": target}), f"{INDEX} cannot be read.*{outside}")
    many = index({str(n): f"{n}.safetensors" for n in range(5000)})
    yield "index: many files", (many, f"{INDEX} cannot be read.*names 5000 files; it may name 4096")
    yield "index: a number", (write(INDEX, '{"weight_map": {"a": 1}}'), "must map names to files")
    absent = index({"a": "gone.safetensors"})
    yield (
        "index: a missing shard",
        (absent, r"the shard gone\.safetensors, listed in .* is missing"),
    )
    yield (
        "only a pickle",
        (
            lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
            r"has no weights .*\*\.bin.* are read only with load_format 'pt'",
        ),
    )


def _tokenizers() -> Iterator[tuple[str, Mutation]]:
    doubling = {"type": "Sequence", "normalizers": [space_to("  ")] * 40}
    decoding = {"type": "Sequence", "decoders": [space_to("  ")] * 7}
    anything = {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 99}
    for case, change, problem in (
        ("a million", tokenizer(normalizer=space_to("x" * 10**6)), "normalizer can make 1000000 "),
        ("2^40", tokenizer(normalizer=doubling), "normalizer can make 1099511627776 "),
        ("nothing", tokenizer(normalizer=anything), "normalizer can make 100 characters of one"),
        ("decoder", tokenizer(decoder=decoding), "decoder can make 128 characters of one; 64 are"),
        (
            "prefix",
            tokenizer(normalizer={"type": "Prepend", "prepend": "x" * 10**6}),
            "normalizer adds 1000000 characters",
        ),
        (
            "steps",
            tokenizer(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 65}),
            "normalizer has 65 steps; 64 are allowed",
        ),
        (
            "copies",
            tokenizer(post_processor=template("A", "A", special=1)),
            "repeats a text 2 times",
        ),
        ("tokens", tokenizer(post_processor=template("A", special=9999)), "can add 19998 tokens"),
    ):
        yield f"tokenizer: {case}", (change, f"the tokenizer multiplies text: its .*{problem}")


MUTATIONS: dict[str, Mutation] = {
    case: mutation
    for group in (_files, _json, _sizes, _weights, _tokenizers)
    for case, mutation in group()
}
