"""A hook costs microseconds: fine at start-up, wrong in the loop."""

from __future__ import annotations

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.config import from_options
from treadle.engine.core import EngineCore
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.introspection import hook_calls


def test_no_hook_is_called_in_a_step(tmp_path):
    """Prefill, decode and finish of a real engine, from the first step to the last."""
    config = from_options(
        model=str(make_checkpoint(tmp_path)), kv_cache_memory_bytes=10_000_000, cpu_threads=1
    )
    plugins = PluginManager(config.plugins)
    with hook_calls(plugins) as started:
        core = EngineCore(config, plugins)
    try:
        assert {
            "treadle_executor",
            "treadle_model",
            "treadle_attention_backend",
            "treadle_scheduling_policy",
        } <= set(started)
        core.add_request(
            EngineRequest("a", list(range(40)), SamplingParams(max_tokens=5, temperature=1.0), 0.0)
        )
        with hook_calls(plugins) as fired:
            outputs = [output for _ in range(20) if core.has_work for output in core.step()]
        assert outputs[-1].finish_reason == "length"
        assert fired == []
    finally:
        core.close()
