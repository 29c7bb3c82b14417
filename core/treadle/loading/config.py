"""What a checkpoint says about itself: configuration, dtype, lengths, defaults for sampling.

Code that lies in a checkpoint is never run: ``auto_map`` is read by nobody here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.api.cache import DeviceInfo
from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

__all__ = (
    "eos_ids",
    "generation_defaults",
    "max_model_len",
    "merge",
    "quantization_config",
    "read_config",
    "resolve_dtype",
)

log = logging.getLogger(__name__)

# The names under which configurations state their context, the usual one first.
LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_seq_length",
    "seq_length",
    "n_ctx",
)
# generation_config.json -> SamplingParams
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_config(
    files: ModelFiles, hf_overrides: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], PreTrainedConfig]:
    """``config.json`` with overrides merged in, as a dict and as a transformers configuration.

    The configuration is of transformers' own class where it knows the ``model_type``, and a generic
    one otherwise. Raises ``CheckpointError`` when it is missing or transformers refuses its values.
    """
    if not files.config and not hf_overrides:
        raise CheckpointError(
            f"{files.root} has no config.json; give the folder that holds the checkpoint, or the "
            "configuration itself with hf_overrides"
        )
    raw = merge(files.config, hf_overrides or {})
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    kind = raw.get("model_type")
    known = isinstance(kind, str) and kind in CONFIG_MAPPING
    family = CONFIG_MAPPING[str(kind)] if known else PreTrainedConfig
    try:
        # A copy: some configurations edit what they are given.
        return raw, family.from_dict(merge(raw, {}))
    except Exception as error:  # each family validates in its own way
        raise CheckpointError(
            f"the configuration of {files.root} (model_type {kind!r}) is refused by transformers: "
            f"{error}; correct it with hf_overrides"
        ) from error


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of ``base`` with ``changes``; mappings are merged, anything else is replaced."""
    merged = {k: merge(v, {}) if isinstance(v, Mapping) else v for k, v in base.items()}
    for key, value in changes.items():
        inside = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = merge(inside if isinstance(inside, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def text_config(hf_config: Any) -> Any:
    """The part that describes the language model; the configuration itself for most models."""
    getter = getattr(hf_config, "get_text_config", None)
    return getter() if callable(getter) else hf_config


def quantization_config(hf_config: Any) -> dict[str, Any] | None:
    """``quantization_config`` (or the older ``compression_config``) as a dict, if there is one."""
    for holder in (hf_config, text_config(hf_config)):
        for name in ("quantization_config", "compression_config"):
            found = getattr(holder, name, None)
            if found is not None:
                return dict(found if isinstance(found, Mapping) else found.to_dict())
    return None


def resolve_dtype(option: str, hf_config: Any, device: DeviceInfo) -> torch.dtype:
    """The dtype of weights and activations.

    ``auto`` takes the checkpoint's, but avoids what a device is bad at: float16 on a CPU and
    bfloat16 on a GPU before Ampere are exchanged for each other. Raises ``ConfigError`` for an
    unknown option, or for bfloat16 where the device has none.
    """
    import torch

    table = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    old_gpu = device.capability is not None and device.capability < (8, 0)
    if option != "auto":
        if option not in table:
            raise ConfigError(f"option dtype is {option!r}; allowed: auto, {', '.join(table)}")
        if option == "bfloat16" and old_gpu:
            raise ConfigError(
                f"option dtype is 'bfloat16', which {device.name} does not have; use float16"
            )
        return table[option]
    found = getattr(text_config(hf_config), "dtype", None) or getattr(hf_config, "dtype", None)
    if isinstance(found, str):
        found = table.get(found.removeprefix("torch."))
    if not isinstance(found, torch.dtype) or found not in table.values():
        found = torch.float32 if device.kind == "cpu" else torch.bfloat16
    if found is torch.float16 and device.kind == "cpu":
        log.info("the checkpoint is float16, which is slow on a CPU: running in bfloat16")
        found = torch.bfloat16
    elif found is torch.bfloat16 and old_gpu:
        log.info(
            "the checkpoint is bfloat16, which %s does not have: running in float16", device.name
        )
        found = torch.float16
    return found


def max_model_len(hf_config: Any, wanted: int | None = None) -> int:
    """The longest sequence of the model, or the shorter one that is wanted.

    Linear and yarn scalings lengthen the stated context. Dynamic scaling does so on demand: it
    leaves the default as it is, because it changes the numerics of short sequences as well.
    Raises ``ConfigError`` if more is wanted than the model was made for, or if the configuration
    states no length and none is wanted.
    """
    config = text_config(hf_config)
    stated = next((n for key in LENGTHS if (n := getattr(config, key, None))), None)
    if stated is None:
        if wanted is None:
            raise ConfigError(
                f"the configuration states no context length ({', '.join(LENGTHS)}); "
                "set max_model_len"
            )
        return wanted
    usual, limit = _lengthened(config, int(stated))
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"option max_model_len is {wanted}, but the model was made for {limit} tokens; lower it, "
            "or state a longer context with hf_overrides '{\"max_position_embeddings\": …}'"
        )
    return wanted or usual


def _lengthened(config: Any, stated: int) -> tuple[int, int]:
    """``(default, limit)`` after rotary scaling."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type")
    factor = rope.get("factor") or 1.0
    if kind == "linear":
        return int(stated * factor), int(stated * factor)
    if kind == "dynamic":
        return stated, int(stated * factor)
    if kind == "yarn":
        trained = rope.get("original_max_position_embeddings") or stated
        longest = max(stated, int(trained * factor))
        return longest, longest
    return stated, stated


def generation_defaults(
    files: ModelFiles, source: str = "auto", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Sampling parameters that the checkpoint recommends, with the user's overrides.

    ``source`` is ``auto`` (the checkpoint's ``generation_config.json``), ``treadle`` (none) or a
    folder. A checkpoint whose ``do_sample`` is false recommends nothing: its authors meant greedy
    decoding, which a request states itself. Raises ``CheckpointError`` for a damaged file and
    ``ConfigError`` for a folder without one.
    """
    given = _generation_config(files, source)
    defaults = {key: given[key] for key in SAMPLING if given.get(key) is not None}
    if given.get("do_sample") is False:
        defaults = {}
    if given.get("max_new_tokens") is not None:
        defaults["max_tokens"] = given["max_new_tokens"]
    return defaults | dict(overrides or {})


def _generation_config(files: ModelFiles, source: str) -> dict[str, Any]:
    if source == "treadle":
        return {}
    path = (files.root if source == "auto" else Path(source)) / "generation_config.json"
    if not path.is_file():
        if source == "auto":
            return {}
        raise ConfigError(
            f"option generation_config is {source!r}, which holds no generation_config.json; "
            "allowed: auto, treadle, or a folder that holds one"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return found


def eos_ids(hf_config: Any, files: ModelFiles | None = None) -> frozenset[int]:
    """Every id that ends a text, by ``config.json`` and ``generation_config.json`` together."""
    found: set[int] = set()
    stated = [getattr(text_config(hf_config), "eos_token_id", None)]
    stated.append(getattr(hf_config, "eos_token_id", None))
    if files is not None:
        stated.append(_generation_config(files, "auto").get("eos_token_id"))
    for value in stated:
        values = value if isinstance(value, (list, tuple)) else [value]
        found.update(v for v in values if isinstance(v, int) and not isinstance(v, bool))
    return frozenset(found)
