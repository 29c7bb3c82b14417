"""A folder for OpenVINO GenAI with random weights in eight bits, in the shape of a model.

::

    openvino-venv/bin/python benchmarks/openvino_shape.py benchmarks/shapes/qwen3-0.6b FOLDER

It needs ``openvino-genai`` and ``optimum-intel[openvino]``. The tokenizer has a token for each byte and is never asked, but
the pipeline wants one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import openvino
import torch
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast


def main() -> None:
    shape, folder = sys.argv[1:]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape), dtype=torch.float32)
    with tempfile.TemporaryDirectory() as checkpoint:
        model.save_pretrained(checkpoint)
        OVModelForCausalLM.from_pretrained(
            checkpoint, export=True, load_in_8bit=True
        ).save_pretrained(folder)
    save_tokenizer(Path(folder))


def save_tokenizer(folder: Path) -> None:
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens = [
        *sorted(pre_tokenizer.alphabet()),
        "ab",
        "</s>",
    ]  # one merge and one token of its own are the least
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    for name, converted in zip(
        ("tokenizer", "detokenizer"), convert_tokenizer(fast, with_detokenizer=True), strict=True
    ):
        openvino.save_model(converted, folder / f"openvino_{name}.xml")


if __name__ == "__main__":
    main()
