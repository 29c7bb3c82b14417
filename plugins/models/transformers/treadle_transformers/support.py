"""Which models of transformers can run on paged attention, as far as their class says."""

from __future__ import annotations

from typing import Any

from treadle.errors import UnsupportedModelError

__all__ = ("causal_class", "check_config", "refusal", "transformers_config")

# What a layer may be besides attention is state that paged attention does not keep.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})


def refusal(architecture: str, reason: str) -> UnsupportedModelError:
    """The error for a model that transformers has and this plugin cannot run."""
    return UnsupportedModelError(
        f"transformers has {architecture}, but treadle-transformers cannot run it: {reason}; it needs a "
        "plugin of its own (treadle plugin new models), or another checkpoint"
    )


def causal_class(architecture: str) -> Any | None:
    """The class of a causal language model; ``None`` if transformers has none of that name.

    Raises ``UnsupportedModelError`` for one whose class says that it does not use the attention
    interface, or that it keeps state of another kind.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return None
    family = getattr(transformers, architecture, None)
    if family is None:
        return None
    if getattr(family, "_is_stateful", False):
        raise refusal(
            architecture,
            "it keeps a state for each sequence (state-space, linear attention or convolution), and "
            "treadle caches keys and values only",
        )
    if not getattr(family, "_supports_attention_backend", False):
        raise refusal(architecture, "its attention does not go through transformers' interface")
    return family


def transformers_config(config: Any) -> Any:
    """Return a configuration as transformers' own class, which an engine does not always read."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    kind = str(getattr(config, "model_type", None))
    if isinstance(config, PreTrainedConfig) or kind not in CONFIG_MAPPING:
        return config
    return CONFIG_MAPPING[kind].from_dict(dict(vars(config)))


def check_config(architecture: str, config: Any) -> None:
    """Raise ``UnsupportedModelError`` for a configuration that asks for what is not there."""
    if config.get_text_config() is not config:
        raise refusal(architecture, "it has parts besides its language model (images, audio)")
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(architecture, "it is an encoder and a decoder")
    if getattr(config, "num_kv_shared_layers", 0):
        raise refusal(architecture, "some of its layers use the keys and values of other layers")
    if sparse := sorted(k for k, v in vars(config).items() if k.startswith("index_") and v):
        raise refusal(architecture, f"its attention picks the keys it looks at ({sparse[0]})")
    types = set(getattr(config, "layer_types", None) or ())
    if unsupported := sorted(map(str, types - LAYER_TYPES)):
        raise refusal(
            architecture,
            f"its configuration has layers of type {', '.join(unsupported)}; supported are "
            f"{', '.join(sorted(LAYER_TYPES))}",
        )
