"""Which executor runs a configuration that names none."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.config import from_options
from treadle.errors import PluginNotFoundError
from treadle.loading.matching import choose_executor
from treadle.plugins import PluginManager
from treadle.text.assets import plugin_config

MP, RAY = "treadle-executor-mp", "treadle-executor-ray"


def chosen(**options: Any) -> str:
    config = from_options(options)
    return choose_executor(config.device, PluginManager(plugin_config(config)))


@pytest.mark.parametrize(
    ("options", "executor"),
    [
        ({}, "uni"),
        ({"tensor_parallel_size": 2}, "mp"),
        ({"tensor_parallel_size": 2, "disable_plugin": [MP]}, "ray"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "ray"),
        ({"distributed_executor_backend": "mp"}, "mp"),
    ],
)
def test_the_executor_follows_the_number_of_ranks(options: dict[str, Any], executor: str) -> None:
    assert chosen(**options) == executor


def test_several_ranks_without_an_executor_say_what_to_install() -> None:
    with pytest.raises(
        PluginNotFoundError, match=r"tensor_parallel_size is 2 and no executor .*mp"
    ):
        chosen(tensor_parallel_size=2, disable_plugin=[MP, RAY])
