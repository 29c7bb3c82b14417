"""A hook costs microseconds: fine at start-up, wrong in the loop."""

from __future__ import annotations

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.config import from_options
from treadle.engine.core import EngineCore
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint


def test_no_hook_is_called_in_a_step(tmp_path):
    """Prefill, decode and finish of a real engine, from the first step to the last."""
    config = from_options(model=str(make_checkpoint(tmp_path)), cpu_cache_gib=0.01, threads=1)
    host = PluginManager(config.plugins)
    with host.calls() as started:
        core = EngineCore(config, host)
    try:
        assert {"treadle_executor", "treadle_model", "treadle_attention", "treadle_policy"} <= set(
            started
        )
        core.add(
            EngineRequest("a", list(range(40)), SamplingParams(max_tokens=5, temperature=1.0), 0.0)
        )
        with host.calls() as fired:
            outputs = [output for _ in range(20) if core.has_work for output in core.step()]
        assert outputs[-1].finish_reason == "length"
        assert fired == []
    finally:
        core.close()
