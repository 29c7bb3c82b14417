"""Writes a checkpoint as one GGUF file, as llama.cpp's converter does."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantized_formats.gguf_blocks import NUMBERS, pack_blocks

__all__ = ("convert", "write_file")

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
EXPERT = re.compile(r"(.*)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def convert(source: Path, file: Path, plain: Path, types: Mapping[str, str]) -> None:
    """Write ``file``, and the same model with the numbers that it has into the folder ``plain``.

    ``types`` are by the last component of GGUF's names; ``*`` are all other matrices. Norms are F32.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    tensors: dict[str, tuple[str, Tensor]] = {}
    dense: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        path, _, leaf = name.rpartition(".")
        if match := EXPERT.fullmatch(name):
            numbers, dense[name] = _store(weight.float(), types["*"])
            layer = match[1].rpartition(".")[2]
            stacks.setdefault(f"blk.{layer}.ffn_{match[3]}_exps.weight", {})[int(match[2])] = (
                numbers
            )
            continue
        if path in WHOLE:
            stored = WHOLE[path]
        else:
            _, _, layer, path = path.split(".", 3)
            stored = f"blk.{layer}.{LAYER[path]}"
        stem = stored.rpartition(".")[2]
        type = types.get(stem, types["*"]) if weight.dim() == 2 else "F32"
        numbers, dense[name] = _store(weight.float(), type)
        if architecture == "llama" and stem in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
            numbers = numbers.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        tensors[f"{stored}.{leaf}"] = (type, numbers)
    for name, experts in stacks.items():
        tensors[name] = (types["*"], torch.stack([experts[i] for i in range(len(experts))]))
    write_file(file, _values(source, config, architecture), tensors)
    shutil.copytree(source, plain)
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})


def _store(weight: Tensor, type: str) -> tuple[Tensor, Tensor]:
    if type == "F32":
        return weight, weight
    if type == "F16":
        return weight.half(), weight.half().float()
    return pack_blocks(weight, type)


def _values(source: Path, config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    vocab = dict(tokenizer["model"]["vocab"])
    special = {t["content"]: t["id"] for t in tokenizer["added_tokens"] if t["special"]}
    vocab |= {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    values = {
        "general.architecture": architecture,
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.key_length": config["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(m) for m in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": vocab[settings["eos_token"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings.get("chat_template")
        or (source / "chat_template.jinja").read_text(),
    }
    if count := config.get("num_experts", config.get("num_local_experts")):
        values[f"{architecture}.expert_count"] = count
        values[f"{architecture}.expert_used_count"] = config["num_experts_per_tok"]
        values[f"{architecture}.expert_feed_forward_length"] = config["moe_intermediate_size"]
    if settings.get("bos_token"):
        values["tokenizer.ggml.bos_token_id"] = vocab[settings["bos_token"]]
    return values


def write_file(
    file: Path, values: Mapping[str, Any], tensors: Mapping[str, tuple[str, Tensor]]
) -> None:
    """Write a file of version 3 with an alignment of 32."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)))
    for key, value in values.items():
        out += _text(key) + _value(value)
    body = bytearray()
    for name, (type, numbers) in tensors.items():
        # Blocks count their numbers: 32, or 256 in those of more bytes than any of 32.
        shape = list(numbers.shape)
        if numbers.dtype is torch.uint8:
            shape = [*shape[:-2], shape[-2] * (32 if shape[-1] < 64 else 256)]
        out += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        out += struct.pack("<IQ", NUMBERS[type], len(body))
        body += numbers.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        body += bytes(-len(body) % 32)
    out += bytes(-len(out) % 32)
    file.write_bytes(out + body)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
    kind = 8 if value and isinstance(value[0], str) else 5
    items = b"".join(_text(v) if kind == 8 else struct.pack("<i", v) for v in value)
    return struct.pack("<IIQ", 9, kind, len(value)) + items
