"""Any causal model of transformers, for architectures that no other plugin has."""

from __future__ import annotations

from typing import Any

from treadle.api.hookspecs import impl
from treadle.api.models import ModelSpec

__all__ = ("treadle_model",)


@impl
def treadle_model(architecture: str, hf_config: Any) -> ModelSpec | None:
    """Describe a causal language model of transformers; ``None`` if it has none of that name.

    Raises ``UnsupportedModelError`` with the reason for one that cannot run on paged attention.
    """
    from treadle_transformers.support import causal_class, transformers_config

    family = causal_class(architecture)
    if family is None:
        return None
    from treadle_transformers.model import TransformersModel
    from treadle_transformers.weight_names import ignored, renamed

    config = transformers_config(hf_config)
    return ModelSpec(
        architecture=architecture,
        build=TransformersModel,
        weight_prefix_map=renamed(family, config),
        ignored_weights=ignored(family, config),
    )
