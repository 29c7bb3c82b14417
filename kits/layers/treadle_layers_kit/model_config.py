"""Reading a ``config.json`` without transformers, for model plugins.

Importing a configuration of transformers takes longer than everything else in the start of a small
model. Any key, type or value that is not ordinary is left to transformers, which validates it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ("DECODER", "read_fields")

# What every configuration of transformers has.
COMMON: dict[str, Any] = {
    "transformers_version": None,
    "architectures": None,
    "output_hidden_states": False,
    "return_dict": True,
    "dtype": None,
    "is_encoder_decoder": False,
}
# What decoders have in common, with the defaults of Llama.
DECODER: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_dropout": 0.0,
}
NULLABLE = ("bos_token_id", "eos_token_id", "sliding_window")
# The numbers of each type of scaling, and what else may be there.
SCALING: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
}
FLAGS = {"yarn": ("truncate",)}
DTYPES = ("float32", "bfloat16", "float16")
LAYER_TYPES = {"full_attention", "sliding_attention"}
OLD_NAMES = ("model_type", "torch_dtype", "rope_theta", "rope_scaling", "quantization_config")


def read_fields(
    config: Mapping[str, Any], fields: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the fields as transformers reads them, ``None`` if only transformers can.

    ``fields`` are those of each model type, with the defaults of transformers: ``DECODER``, and what
    differs. With the field ``use_sliding_window``, some layers have the window, as in Qwen's models; other
    model types with ``layer_types`` have to list them.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in fields:
        return None
    defaults = {**COMMON, **fields[kind]}
    if not config.keys() <= {*defaults, *OLD_NAMES}:
        return None
    values = {name: config.get(name, default) for name, default in defaults.items()}
    values["dtype"] = config.get("dtype") or config.get("torch_dtype")
    rope = _rope_parameters(config, defaults.get("rope_parameters") or {})
    if rope is None or not all(_is_ordinary(n, v, defaults[n]) for n, v in values.items()):
        return None
    values |= {"model_type": kind, "rope_parameters": rope}
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if "head_dim" in values and values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    if "use_sliding_window" in values:
        _set_layer_types(values)
    elif "layer_types" in values and values["layer_types"] is None:
        return None
    if "quantization_config" in config:
        values["quantization_config"] = config["quantization_config"]
    return values if _is_consistent(values) else None


def _is_ordinary(name: str, value: Any, default: Any) -> bool:
    """Return whether a value has the type of its field, and a size is positive."""
    match name:
        case "architectures" | "layer_types":
            return value is None or (
                isinstance(value, list) and all(isinstance(x, str) for x in value)
            )
        case "mlp_only_layers":
            return isinstance(value, list) and all(type(x) is int for x in value)
        case "dtype":
            return value is None or value in DTYPES
        case "transformers_version":
            return value is None or isinstance(value, str)
        case "rope_parameters":
            return True
        case "eos_token_id" if isinstance(value, list):
            return all(type(x) is int for x in value)
    if value is None:
        return default is None or name in NULLABLE
    if default is None or name in NULLABLE:
        return type(value) is int and (value > 0 or name.endswith("_token_id"))
    return type(value) is type(default) and (type(value) is not int or value > 0)


def _rope_parameters(raw: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parameters in the form of transformers 5, or ``None`` if they are not ordinary.

    ``default`` are those of the model type, from which a configuration with parameters takes its theta only.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or default
    if not isinstance(given, Mapping):
        return None
    theta = raw.get("rope_theta", default.get("rope_theta", 10000.0))
    if given is default and "rope_theta" in raw:
        given = {**default, "rope_theta": theta}
    rope = {"rope_theta": theta, "rope_type": "default", **given}
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in SCALING:
        return None
    numbers, flags = ("rope_theta", *SCALING[kind]), FLAGS.get(kind, ())
    names = {"rope_type", *numbers}
    if not names <= rope.keys() <= names | set(flags):
        return None
    if not all(type(rope.get(flag, True)) is bool for flag in flags):
        return None
    return rope if all(type(rope[n]) in (int, float) and rope[n] > 0 for n in numbers) else None


def _set_layer_types(values: dict[str, Any]) -> None:
    if not values["use_sliding_window"]:
        values["sliding_window"] = None
    if "layer_types" in values and values["layer_types"] is None:
        first = values["max_window_layers"] if values["sliding_window"] else math.inf
        values["layer_types"] = [
            "sliding_attention" if layer >= first else "full_attention"
            for layer in range(values["num_hidden_layers"])
        ]


def _is_scaling_right(rope: Mapping[str, Any], max_positions: int) -> bool:
    match rope["rope_type"]:
        case "llama3":
            is_ordered = rope["low_freq_factor"] < rope["high_freq_factor"]
            is_longer = rope["original_max_position_embeddings"] < max_positions
            return bool(rope["factor"] >= 1 and is_ordered and is_longer)
        case "yarn":
            is_ordered = rope["beta_slow"] < rope["beta_fast"]
            length = rope["original_max_position_embeddings"] * rope["factor"]
            return bool(rope["factor"] >= 1 and is_ordered and length == max_positions)
    return True


def _is_consistent(values: Mapping[str, Any]) -> bool:
    """Return whether transformers accepts the values together, without a warning."""
    rope, layer_types = values["rope_parameters"], values.get("layer_types")
    token_ids = [v for n, v in values.items() if n.endswith("_token_id") and isinstance(v, int)]
    return (
        _is_scaling_right(rope, values["max_position_embeddings"])
        and values["hidden_size"] % values["num_attention_heads"] == 0
        and values.get("head_dim", 0) % 2 == 0
        and 0 <= values["initializer_range"] <= 1
        and all(0 <= token_id < values["vocab_size"] for token_id in token_ids)
        and (
            layer_types is None
            or (len(layer_types) == values["num_hidden_layers"] and set(layer_types) <= LAYER_TYPES)
        )
    )
