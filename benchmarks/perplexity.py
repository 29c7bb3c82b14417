"""What quantization loses: the perplexity of the demo model on a fixed text, for each way to store its weights.

::

    python benchmarks/perplexity.py            # write docs/data/perplexity.json; then python tools/sync.py
    python benchmarks/perplexity.py --only nf4 # print the rows whose names contain this

The text, ``benchmarks/perplexity.txt``, was made by the generator of the training data with a seed of its own. Each piece of
it is a prompt, and the log probabilities of its tokens are the engine's. The logits are computed in float32, so that
only the weights differ; sizes are those of the weights in memory of an engine in bfloat16. Nothing is calibrated: numbers are rounded
to the nearest, except that ``treadle quantize`` looks for better scales of four bits.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from treadle import LLM, SamplingParams
from treadle.loading import fetch, parse_ref
from treadle.plugins import PluginManager
from treadle.testing.packing import AwqFormat, Format, Fp8Format, GptqFormat, pack_checkpoint

ROOT = Path(__file__).resolve().parents[1]
# The formats that the tests write themselves.
sys.path.append(str(ROOT / "tests/conformance"))

from quantized_formats.bitsandbytes import FourBitFormat  # noqa: E402
from quantized_formats.compressed_tensors import Fp4Format  # noqa: E402
from quantized_formats.gguf_blocks import GgufFormat  # noqa: E402
from quantized_formats.hqq import HqqFormat  # noqa: E402
from quantized_formats.mxfp4 import Mxfp4Format  # noqa: E402
from quantized_formats.quark import QuarkFormat  # noqa: E402
from quantized_formats.torchao import TorchAoFormat  # noqa: E402
from treadle_command_quantize.conversion import convert  # noqa: E402
from treadle_command_quantize.rounding import recipe_of  # noqa: E402

MODEL = "demo:treadle-demo"
NATIVE = ["treadle-kernels-native"]
TEXT = ROOT / "benchmarks/perplexity.txt"
RESULT = ROOT / "docs/data/perplexity.json"
PIECE = "\n%%\n"

Make = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Row:
    """A way to store the weights: ``make`` writes a checkpoint, ``options`` quantize while loading."""

    name: str
    method: str
    make: Make | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def packed(format: Format) -> Make:
    def make(source: Path, folder: Path) -> None:
        pack_checkpoint(source, folder, folder.with_name("plain"), format)

    return make


def converted(method: Any, group: int = 128) -> Make:
    def make(source: Path, folder: Path) -> None:
        plugins = PluginManager()
        convert(plugins, fetch(plugins, parse_ref(MODEL)), folder, recipe_of(method, group))

    return make


def online(method: str, **options: Any) -> dict[str, Any]:
    return {"quantization": method, "plugin_options": {f"quantization:{method}": options}}


def native(method: str) -> dict[str, Any]:
    """Options of the native kernels' own weights, whose activations are rounded too."""
    return {"quantization": method, "disable_plugin": []}


def gptq(bits: int) -> Make:
    return packed(GptqFormat(bits=bits, group_size=128, sym=False))


BNB = "bitsandbytes"
ROWS = (
    Row("bfloat16", "none"),
    Row("FP8, outputs", "treadle quantize -m fp8", converted("fp8")),
    Row("FP8, blocks of 128 × 128", "fp8", packed(Fp8Format("block"))),
    Row("8 bits, outputs", "treadle quantize -m int8", converted("int8")),
    Row("8 bits, outputs", BNB, None, online(BNB, type="int8")),
    Row("8 bits, outputs", "int8", None, native("int8")),
    Row("8 bits, groups of 128", "gptq", gptq(8)),
    Row("8 bits, outputs", "torchao", packed(TorchAoFormat())),
    Row("FP8, outputs", "torchao", packed(TorchAoFormat("fp8"))),
    Row("FP8, matrix", "quark", packed(QuarkFormat())),
    Row("Q8_0", "gguf", packed(GgufFormat("Q8_0"))),
    Row("Q6_K", "gguf", packed(GgufFormat("Q6_K"))),
    Row("Q5_1", "gguf", packed(GgufFormat("Q5_1"))),
    Row("4 bits, groups of 32", "treadle quantize -m int4", converted("int4", 32)),
    Row("4 bits, groups of 128", "treadle quantize -m int4", converted("int4")),
    Row("4 bits, groups of 128", "awq", packed(AwqFormat(128))),
    Row("4 bits, groups of 128", "gptq", gptq(4)),
    Row("4 bits, groups of 64", "int4", None, native("int4")),
    Row("4 bits, groups of 64", "hqq", packed(HqqFormat(4, 64))),
    Row("4 bits, groups of 128", "torchao", packed(TorchAoFormat("int4", group=128))),
    Row("4 bits, groups of 128", "quark", packed(QuarkFormat("uint4", "per_group", 128))),
    Row("NF4, blocks of 64", BNB, None, online(BNB, type="nf4")),
    Row("NF4, double quantization", BNB, packed(FourBitFormat(double=True))),
    Row("FP4, blocks of 64", BNB, None, online(BNB, type="fp4")),
    Row("NVFP4, groups of 16", "compressed-tensors", packed(Fp4Format())),
    Row("MXFP4, groups of 32", "compressed-tensors", packed(Fp4Format(32))),
    Row("MXFP4, groups of 32", "mxfp4", packed(Mxfp4Format())),
    Row("Q4_0", "gguf", packed(GgufFormat("Q4_0"))),
    Row("IQ4_NL", "gguf", packed(GgufFormat("IQ4_NL"))),
    Row("3 bits, groups of 128", "gptq", gptq(3)),
    Row("3 bits, groups of 64", "hqq", packed(HqqFormat(3, 64))),
    Row("2 bits, groups of 128", "gptq", gptq(2)),
    Row("2 bits, groups of 16", "hqq", packed(HqqFormat(2, 16))),
)


def pieces() -> list[str]:
    return TEXT.read_text().removesuffix("\n").split(PIECE)


def measure(row: Row, texts: list[str]) -> dict[str, Any]:
    """The size of the weights and the perplexity of one row."""
    with tempfile.TemporaryDirectory() as home:
        model = MODEL
        if row.make is not None:
            source = fetch(PluginManager(), parse_ref(MODEL)).root
            model = str(Path(home, "packed"))
            row.make(source, Path(model))
        # In torch, as all formats have it: native kernels lay no weights out anew.
        options = {"device": "cpu", "num_pages": 512, "max_num_seqs": 8, "disable_plugin": NATIVE}
        options |= row.options
        with LLM(model, dtype="bfloat16", **options) as llm:
            size = llm.info.weights_bytes
        with LLM(model, dtype="float32", **options) as llm:
            losses = list(_losses(llm, texts))
    return {
        "format": row.name,
        "method": row.method,
        # Native kernels read an embedding that is tied to the head where the file is mapped.
        "bytes": None if row.options.get("disable_plugin") == [] else size,
        "tokens": len(losses),
        "perplexity": round(math.exp(sum(losses) / len(losses)), 4),
    }


def _losses(llm: LLM, texts: list[str]) -> Iterator[float]:
    """The negative log probability of every token but the first of each text."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for output in llm.generate(texts, params, use_tqdm=False):
        logprobs = output.prompt_logprobs or []
        for token, places in zip(output.prompt_token_ids, logprobs, strict=True):
            if places is not None:
                yield -places[token].logprob


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="print the rows whose names contain this")
    only = parser.parse_args().only
    rows = []
    for row in ROWS:
        if only.lower() in f"{row.name} {row.method}".lower():
            rows.append(measure(row, pieces()))
            print(json.dumps(rows[-1]), flush=True)
    if not only:
        result = {
            "model": MODEL,
            "command": "python benchmarks/perplexity.py",
            "date": f"{date.today():%B %Y}",
            "torch": torch.__version__,
            "rows": rows,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
