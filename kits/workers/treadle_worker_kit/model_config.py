"""A checkpoint's configuration: dtype, maximum length, EOS ids.

Code in a checkpoint is never run: ``auto_map`` is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from treadle.api.cache import DeviceInfo
from treadle.api.checkpoints import read_json
from treadle.api.files import ModelFiles
from treadle.api.kinds import MODELS
from treadle.errors import CheckpointError, ConfigError, PluginLoadError, PluginNotFoundError
from treadle.loading import config_json
from treadle.loading.config import LAYERS
from treadle.plugins import PluginManager

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

__all__ = (
    "PlainConfig",
    "eos_ids",
    "max_model_len",
    "num_layers",
    "quantization_config",
    "read_config",
    "resolve_dtype",
    "text_config",
)

log = logging.getLogger(__name__)

# Where ModelOpt says how weights are stored; later versions say it in config.json as well.
MODELOPT = "hf_quant_config.json"
# Names of the context length in configurations, the most common one first.
LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_seq_length",
    "seq_length",
    "n_ctx",
)


class PlainConfig:
    """The fields of a configuration that a model plugin has read."""

    architectures: list[str] | None

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    @property
    def rope_scaling(self) -> Any:
        return vars(self).get("rope_parameters")

    def get_text_config(self) -> PlainConfig:
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def read_config(
    files: ModelFiles, plugins: PluginManager, hf_overrides: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], PlainConfig | PreTrainedConfig]:
    """Return ``config.json`` with overrides, as a dict and as a configuration.

    It is a ``PlainConfig`` if the plugin of the architecture can read it, others are of transformers:
    of a generic class if it does not know the ``model_type``. Raises ``CheckpointError`` if ``config.json``
    is missing, a size in it is out of bounds, or transformers rejects its values.
    """
    if not files.config and not hf_overrides:
        raise CheckpointError(
            f"{files.root} has no config.json; give the folder of the checkpoint, or the "
            "configuration itself with hf_overrides"
        )
    raw = config_json(files, hf_overrides)
    if "quantization_config" not in raw and (stored := read_json(files.root, MODELOPT)):
        raw["quantization_config"] = {"quant_method": "modelopt", **stored}
    if (config := _plain_config(raw, plugins)) is not None:
        return raw, config
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    kind = raw.get("model_type")
    is_known = isinstance(kind, str) and kind in CONFIG_MAPPING
    config_class = CONFIG_MAPPING[str(kind)] if is_known else PreTrainedConfig
    try:
        # A copy, since some configurations edit their argument.
        return raw, config_class.from_dict(deepcopy(raw))
    except Exception as error:  # each family validates in its own way
        raise CheckpointError(
            f"transformers rejects the configuration of {files.root} (model_type {kind!r}): "
            f"{error}; correct it with hf_overrides"
        ) from error


def _plain_config(raw: Mapping[str, Any], plugins: PluginManager) -> PlainConfig | None:
    """Return what the plugin of the first architecture that has one reads, without transformers."""
    names = raw.get("architectures")
    for name in filter(lambda n: isinstance(n, str), names if isinstance(names, list) else ()):
        try:
            hooks = plugins.hooks_for(MODELS.name, name)
        except PluginNotFoundError:
            continue
        values = hooks.treadle_model_config(
            architecture=name, config=deepcopy(raw), options=plugins.options(MODELS.name, name)
        )
        if isinstance(values, Mapping):
            return PlainConfig(values)
        if values is not None:
            raise PluginLoadError(
                f"{MODELS.name}:{name} answered treadle_model_config with {values!r:.200}; the fields "
                "of the configuration were expected, or None"
            )
        return None
    return None


def text_config(hf_config: Any) -> Any:
    """Return the language model's part of a configuration; for most models, all of it."""
    getter = getattr(hf_config, "get_text_config", None)
    return getter() if callable(getter) else hf_config


def num_layers(hf_config: Any) -> int | None:
    """Return the number of layers, ``None`` if the configuration has none or a list of them."""
    config = text_config(hf_config)
    value = next((n for name in LAYERS if (n := getattr(config, name, None)) is not None), None)
    return value if isinstance(value, int) else None


def quantization_config(hf_config: Any) -> dict[str, Any] | None:
    """Return ``quantization_config`` or the older ``compression_config``, or ``None``."""
    for holder in (hf_config, text_config(hf_config)):
        for name in ("quantization_config", "compression_config"):
            value = getattr(holder, name, None)
            if value is not None:
                return dict(value if isinstance(value, Mapping) else value.to_dict())
    return None


def resolve_dtype(option: str, hf_config: Any, device: DeviceInfo) -> torch.dtype:
    """Return the dtype of weights and activations.

    ``auto`` is the checkpoint's, except that float16 becomes bfloat16 on a CPU, and bfloat16
    becomes float16 on GPUs before Ampere. Raises ``ConfigError`` if the option is unknown, or is
    bfloat16 and the device does not support it.
    """
    import torch

    table = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    is_pre_ampere = device.capability is not None and device.capability < (8, 0)
    if option != "auto":
        if option not in table:
            raise ConfigError(f"option dtype is {option!r}; allowed: auto, {', '.join(table)}")
        if option == "bfloat16" and is_pre_ampere:
            raise ConfigError(
                f"option dtype is 'bfloat16', which {device.name} does not support; use float16"
            )
        return table[option]
    dtype = getattr(text_config(hf_config), "dtype", None) or getattr(hf_config, "dtype", None)
    if isinstance(dtype, str):
        dtype = table.get(dtype.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype) or dtype not in table.values():
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype is torch.float16 and device.type == "cpu":
        log.info("the checkpoint is float16, which is slow on a CPU; using bfloat16")
        dtype = torch.bfloat16
    elif dtype is torch.bfloat16 and is_pre_ampere:
        log.info(
            "the checkpoint is bfloat16, which %s does not support; using float16", device.name
        )
        dtype = torch.float16
    return dtype


def max_model_len(hf_config: Any, requested: int | None = None) -> int:
    """Return the maximum sequence length: ``requested``, or the model's context length.

    Linear and yarn RoPE scaling extend the configured context. Dynamic scaling extends only the
    limit for ``requested``, because it changes the results of short sequences as well. Raises
    ``ConfigError`` if ``requested`` exceeds the limit, or if neither it nor a context length is set.
    """
    config = text_config(hf_config)
    context_length = next((n for key in LENGTHS if (n := getattr(config, key, None))), None)
    if context_length is None:
        if requested is None:
            raise ConfigError(
                f"the configuration has no context length ({', '.join(LENGTHS)}); set max_model_len"
            )
        return requested
    default, limit = _scaled_context_lengths(config, int(context_length))
    if requested is not None and requested > limit:
        raise ConfigError(
            f"option max_model_len is {requested}, but the model supports {limit} tokens; lower it, "
            "or set a longer context with hf_overrides '{\"max_position_embeddings\": …}'"
        )
    return requested or default


def _scaled_context_lengths(config: Any, context_length: int) -> tuple[int, int]:
    """Return ``(default, limit)`` of the context length after RoPE scaling."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type")
    factor = rope.get("factor") or 1.0
    if kind == "linear":
        return int(context_length * factor), int(context_length * factor)
    if kind == "dynamic":
        return context_length, int(context_length * factor)
    if kind == "yarn":
        trained = rope.get("original_max_position_embeddings") or context_length
        limit = max(context_length, int(trained * factor))
        return limit, limit
    return context_length, context_length


def eos_ids(hf_config: Any, files: ModelFiles) -> frozenset[int]:
    """Return all EOS token ids of ``config.json`` and ``generation_config.json``."""
    ids: set[int] = set()
    for value in (
        getattr(text_config(hf_config), "eos_token_id", None),
        getattr(hf_config, "eos_token_id", None),
        read_json(files.root, "generation_config.json").get("eos_token_id"),
    ):
        values = value if isinstance(value, (list, tuple)) else [value]
        ids.update(v for v in values if type(v) is int and 0 <= v < 2**31)
    return frozenset(ids)
