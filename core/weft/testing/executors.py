"""The conformance suite of executors: the tokens of ``inline``, in order, and a clean end.

::

    class TestMine(PluginSuite, ExecutorSuite):
        plugin = "executors:mine"
        engine = {"tensor_parallel_size": 2}    # options of the engine that it is for
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from weft.errors import WeftError
from weft.testing.plugin import Subject

if TYPE_CHECKING:
    from weft.engine.core import EngineCore

__all__ = ("ExecutorSuite",)


class ExecutorSuite(Subject):
    """Runs a tiny Llama on the CPU under the executor, and compares."""

    engine: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        from weft.testing.checkpoints import make_checkpoint

        return make_checkpoint(tmp_path / "tiny")

    def core(self, model: Path, executor: str, **options: Any) -> EngineCore:
        from weft.config import from_options
        from weft.engine.core import EngineCore

        given = {"device": "cpu", "dtype": "float32", "threads": 1, "num_pages": 64, **options}
        return EngineCore(from_options(model=str(model), executor=executor, **given), self.host())

    def tokens(self, core: EngineCore) -> dict[str, list[int]]:
        """Three requests, the last of which comes while the others run."""
        from weft.engine.messages import EngineRequest
        from weft.sampling.params import SamplingParams

        requests = [
            EngineRequest(
                name,
                [(7 * i + j) % 200 for j in range(5 + 6 * i)],
                SamplingParams(max_tokens=9, ignore_eos=True, temperature=heat, seed=i),
                float(i),
            )
            for i, (name, heat) in enumerate((("a", 0.0), ("b", 0.9), ("c", 0.0)))
        ]
        found: dict[str, list[int]] = {request.id: [] for request in requests}
        core.add(requests[0])
        core.add(requests[1])
        for step in range(200):
            if step == 3:
                core.add(requests[2])
            if step > 3 and not core.has_work:
                break
            for output in core.step():
                assert output.error is None, output.error
                found[output.id] += output.tokens
        return found

    def test_its_tokens_are_those_of_one_process(self, checkpoint: Path) -> None:
        with closing(self.core(checkpoint, "inline")) as core:
            expected = self.tokens(core)
        with closing(self.core(checkpoint, self.key, **self.engine)) as core:
            facts = core.facts
            assert self.tokens(core) == expected
            core.check()
            assert self.tokens(core) == expected, "a second round differs"
        assert facts.vocab_size and facts.page_size and facts.groups and facts.max_model_len

    def test_a_failed_start_is_an_error_of_weft(self, tmp_path: Path) -> None:
        with pytest.raises(WeftError):
            self.core(tmp_path, self.key, **self.engine)

    def test_it_may_be_stopped_without_a_start(self, checkpoint: Path) -> None:
        from weft.config import from_options

        config = from_options(model=str(checkpoint), executor=self.key, device="cpu", **self.engine)
        self.host().executor(self.key, config).stop()
