"""What a GGUF file says of its model, as the files that a checkpoint on the hub has."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from treadle.errors import CheckpointError, UnsupportedModelError
from treadle_gguf.names import ARCHITECTURES, is_matrix, places
from treadle_gguf.reader import Header

__all__ = ("checkpoint_files", "model_config")

log = logging.getLogger(__name__)

CONTROL_TOKENS = ("bos", "eos", "unknown", "padding")
ROPE_TYPES = ("linear", "yarn")


def checkpoint_files(header: Header) -> dict[str, str]:
    """Return the texts of ``config.json`` and, if it has one that can be read, of the tokenizer's files.

    Raises ``CheckpointError`` for everything else.
    """
    try:
        return _files(header)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"the values of {header.path} do not have the types that they should have ({error}); download "
            "it again"
        ) from error


def _files(header: Header) -> dict[str, str]:
    config = model_config(header)
    eos = [header.values.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot")]
    generation = {"eos_token_id": list(dict.fromkeys(i for i in eos if i is not None)) or None}
    files = {"config.json": json.dumps(config), "generation_config.json": json.dumps(generation)}
    try:
        files["tokenizer.json"] = _tokenizer(header)
    except CheckpointError as error:  # which hurts nobody who has another
        log.warning(
            "%s; only prompts of token ids are served unless the option tokenizer gives one", error
        )
        return files
    return files | {"tokenizer_config.json": json.dumps(_tokenizer_settings(header))}


def model_config(header: Header) -> dict[str, Any]:
    """Return the fields of ``config.json``."""
    values = header.values
    architecture = str(values.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path} has the architecture {architecture!r}; treadle-gguf reads "
            f"{', '.join(ARCHITECTURES)}: use the model's safetensors"
        )
    hub_name, model_type = ARCHITECTURES[architecture]

    def value(key: str, default: Any = None) -> Any:
        found = values.get(f"{architecture}.{key}", default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise CheckpointError(
                f"{architecture}.{key} of {header.path} is {found!r:.100}; a number is needed: download the "
                "file again, or use the model's safetensors"
            )
        return found

    if value("expert_count", 0) and architecture == "llama":
        raise UnsupportedModelError(
            f"{header.path} has a mixture of Llama experts, which treadle-gguf does not read: use the "
            "model's safetensors"
        )
    hidden, heads = value("embedding_length"), value("attention.head_count")
    num_vocab = header.tensors["token_embd.weight"].shape[0] if _has_embedding(header) else 0
    config: dict[str, Any] = {
        "architectures": [hub_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": value("block_count"),
        "intermediate_size": value("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", hidden // heads if heads else 0),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "rope_theta": value("rope.freq_base", 10000.0),
        "vocab_size": num_vocab,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "hidden_act": "silu",
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
        "dtype": "bfloat16",
    }
    if (experts := value("expert_count", 0)) > 0:
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": value("expert_used_count"),
            "moe_intermediate_size": value("expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if scaling := _rope_scaling(header, architecture):
        config["rope_scaling"] = scaling
    config["quantization_config"] = {
        "quant_method": "gguf",
        "file": str(header.path),
        "types": _types(header, architecture, experts),
    }
    return config


def _has_embedding(header: Header) -> bool:
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(
            f"{header.path} has no token_embd.weight: it is no whole model (files of several parts are "
            "joined by llama-gguf-split --merge)"
        )
    return True


def _types(header: Header, architecture: str, num_experts: int) -> dict[str, str]:
    """The types of matrices by their names on the hub; ``*`` is the one that most have."""
    types = {
        place.name.removesuffix(".weight"): info.type
        for stored_name, info in header.tensors.items()
        if is_matrix(stored_name, info)
        for place in places(architecture, stored_name, num_experts)
    }
    most, _ = Counter(types.values()).most_common(1)[0] if types else ("F32", 0)
    return {"*": most, **{n: t for n, t in types.items() if t != most or n == "lm_head"}}


def _rope_scaling(header: Header, architecture: str) -> dict[str, Any] | None:
    values, home = header.values, f"{architecture}.rope.scaling"
    if "rope_freqs.weight" in header.tensors:
        # Llama 3.1 and later; the tensor holds what follows from these numbers.
        return {
            "rope_type": "llama3",
            "factor": values.get(f"{home}.factor", 8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    kind = values.get(f"{home}.type")
    if kind in (None, "none"):
        return None
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{header.path} says rope.scaling.type {kind!r}; treadle-gguf reads {', '.join(ROPE_TYPES)}"
        )
    scaling = {"rope_type": kind, "factor": values.get(f"{home}.factor", 1.0)}
    if (length := values.get(f"{home}.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = length
    return scaling


def _tokenizer(header: Header) -> str:
    """The text of ``tokenizer.json``, as transformers makes it from the same values."""
    values = header.values
    fields = {
        "tokens": "tokens",
        "merges": "merges",
        "scores": "scores",
        "token_type": "token_type",
    }
    fields |= {"tokenizer_type": "model", "pre_tokenizer_type": "pre"}
    table: dict[str, Any] = {
        name: values[f"tokenizer.ggml.{key}"]
        for name, key in fields.items()
        if f"tokenizer.ggml.{key}" in values
    }
    if "tokens" not in table:
        raise CheckpointError(f"{header.path} has no tokenizer")
    # Here, for it takes a second.
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    try:
        backend, _ = convert_gguf_tokenizer(values["general.architecture"], table)
        text: str = backend.to_str()
    except Exception as error:  # transformers and tokenizers raise bare ones
        raise CheckpointError(f"the tokenizer of {header.path} cannot be read: {error}") from error
    return text


def _tokenizer_settings(header: Header) -> Mapping[str, Any]:
    """``tokenizer_config.json``: special tokens, whether they are added, the chat template."""
    values = header.values
    tokens = values.get("tokenizer.ggml.tokens", [])
    settings: dict[str, Any] = {}
    for name, key in zip(("bos", "eos", "unk", "pad"), CONTROL_TOKENS, strict=True):
        index = values.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            settings[f"{name}_token"] = tokens[index]
    is_pieces = values.get("tokenizer.ggml.model") == "llama"
    settings["add_bos_token"] = bool(values.get("tokenizer.ggml.add_bos_token", is_pieces))
    settings["add_eos_token"] = bool(values.get("tokenizer.ggml.add_eos_token", False))
    if template := values.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return settings
