"""A context to build layers in, without a checkpoint or a plugin."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treadle.api.models import ModelContext
from treadle.testing.attention_reference import ReferenceBackend
from treadle_layers_kit import SingleRankCommunicator


@pytest.fixture
def context() -> Callable[..., ModelContext]:
    """``context(ranks=…, dtype=…, quantization=…, **fields of the configuration)``."""

    def make(
        *,
        ranks: Any = None,
        dtype: torch.dtype = torch.float32,
        quantization: Any = None,
        max_model_len: int | None = None,
        **config: Any,
    ) -> ModelContext:
        return ModelContext(
            hf_config=SimpleNamespace(**config),
            dtype=dtype,
            device=torch.device("cpu"),
            tp_group=ranks or SingleRankCommunicator(),
            quantization=quantization,
            register_attention=lambda request, spec: ReferenceBackend(request),
            max_model_len=max_model_len,
        )

    return make
