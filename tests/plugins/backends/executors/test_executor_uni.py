"""The executor of one device: what it refuses, before a model is loaded."""

from __future__ import annotations

import pytest
from treadle_executor_uni.executor import UniProcExecutor

from treadle.config import from_options
from treadle.errors import ConfigError
from treadle.plugins import PluginManager


def test_tensor_parallelism_needs_another_executor() -> None:
    config = from_options(model="nobody/nothing", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="distributed_executor_backend='mp'"):
        UniProcExecutor(config, PluginManager())
