"""The conformance suite of executors: the tokens of ``uni``, in order, and a clean end.

::

    class TestMine(PluginSuite, ExecutorSuite):
        plugin = "executors:mine"
        engine = {"tensor_parallel_size": 2}    # options of the engine that it is for
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from treadle.api.kinds import EXECUTORS
from treadle.errors import TreadleError
from treadle.testing.plugin import PluginTest

if TYPE_CHECKING:
    from treadle.api.engine import Executor
    from treadle.api.step_types import EngineInfo, SchedulerOutput
    from treadle.config import EngineConfig
    from treadle.engine.core import EngineCore

__all__ = ("ExecutorSuite",)


class ExecutorSuite(PluginTest):
    """Runs a tiny Llama on the CPU under the executor, and compares."""

    engine: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        from treadle.testing.checkpoints import make_checkpoint

        return make_checkpoint(tmp_path / "tiny")

    def config(self, model: Path, executor: str, **options: Any) -> EngineConfig:
        from treadle.config import from_options

        values = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "num_pages": 64, **options}
        return from_options(model=str(model), distributed_executor_backend=executor, **values)

    def core(self, model: Path, executor: str, **options: Any) -> EngineCore:
        from treadle.engine.core import EngineCore

        return EngineCore(self.config(model, executor, **options), self.plugin_manager())

    @contextmanager
    def started(self, model: Path) -> Iterator[tuple[Executor, EngineInfo]]:
        """Yield a started executor without a scheduler, and its engine info."""
        executor = self.plugin_manager().create(
            EXECUTORS,
            self.key,
            config=self.config(model, self.key, **self.engine),
            plugins=self.plugin_manager(),
        )
        try:
            yield executor, executor.start()
        finally:
            executor.shutdown()

    def prompt(
        self, number: int, info: EngineInfo, *, defer_sampling: bool = False
    ) -> SchedulerOutput:
        """Return a step of one prompt; its sequence has the slot and the first page ``number``."""
        from treadle.api.sampling_params import SamplingParams
        from treadle.api.step_types import NewSequenceData, PageTableUpdate, SchedulerOutput

        ids = [number, 9, 200, 17]
        begins = NewSequenceData(number, SamplingParams(temperature=0.0), len(ids), ids, 0, [], [])
        pages = [
            PageTableUpdate(group, number, 0, [number])
            for group in range(len(info.kv_cache_groups))
        ]
        return SchedulerOutput(
            number, [number], [0], [len(ids)], 0, ids, [True], [begins], [], pages, defer_sampling
        )

    def tokens(self, core: EngineCore) -> dict[str, list[int]]:
        """Run three requests, the last of which arrives while the others run, and return their tokens."""
        from treadle.api.requests import EngineRequest
        from treadle.api.sampling_params import SamplingParams

        requests = [
            EngineRequest(
                name,
                [(7 * i + j) % 200 for j in range(5 + 6 * i)],
                SamplingParams(max_tokens=9, ignore_eos=True, temperature=temperature, seed=i),
                float(i),
            )
            for i, (name, temperature) in enumerate((("a", 0.0), ("b", 0.9), ("c", 0.0)))
        ]
        outputs: dict[str, list[int]] = {request.id: [] for request in requests}
        core.add_request(requests[0])
        core.add_request(requests[1])
        for step in range(200):
            if step == 3:
                core.add_request(requests[2])
            if step > 3 and not core.has_work:
                break
            for output in core.step():
                assert output.error is None, output.error
                outputs[output.id] += output.token_ids
        return outputs

    def test_its_tokens_are_those_of_one_process(self, checkpoint: Path) -> None:
        with closing(self.core(checkpoint, "uni")) as core:
            expected = self.tokens(core)
        with closing(self.core(checkpoint, self.key, **self.engine)) as core:
            info = core.info
            assert self.tokens(core) == expected
            core.check_health()
            assert self.tokens(core) == expected, "a second round differs"
        assert info.vocab_size and info.page_size and info.kv_cache_groups and info.max_model_len

    def test_results_come_in_the_order_of_launches(self, checkpoint: Path) -> None:
        with self.started(checkpoint) as (executor, info):
            plans = [self.prompt(number, info) for number in (3, 1, 2)]
            for scheduler_output in plans:
                executor.execute_model(scheduler_output)
            assert [executor.get_output().id for _ in plans] == [3, 1, 2]

    def test_a_deferred_step_is_completed_by_sample(self, checkpoint: Path) -> None:
        """A deferred step waits for ``sample_tokens``, with a bitmask or without."""
        from treadle.api.step_types import GrammarOutput

        with self.started(checkpoint) as (executor, info):
            executor.execute_model(self.prompt(1, info))
            free = executor.get_output().sampled_token_ids
            executor.execute_model(self.prompt(2, info, defer_sampling=True))
            executor.sample_tokens(None)
            assert len(executor.get_output().sampled_token_ids) == 1
            for token in (7, info.vocab_size - 1):
                assert token not in free
                mask = bytearray(-(-info.vocab_size // 32) * 4)
                mask[token // 8] = 1 << token % 8
                executor.execute_model(self.prompt(1, info, defer_sampling=True))
                executor.sample_tokens(GrammarOutput([0], memoryview(bytes(mask))))
                assert executor.get_output().sampled_token_ids == [token]

    def test_a_step_that_fails_is_said_so(self, checkpoint: Path) -> None:
        """Its result has the error and the next step runs, or an error of treadle ends the executor."""
        import msgspec

        with self.started(checkpoint) as (executor, info):
            invalid_step = msgspec.structs.replace(self.prompt(1, info), slots=[10**6])
            try:
                executor.execute_model(invalid_step)
                failed = executor.get_output()
            except TreadleError:
                return
            assert failed.id == invalid_step.id and failed.error and not failed.sampled_token_ids
            executor.execute_model(self.prompt(2, info))
            right = executor.get_output()
            assert right.id == 2 and right.error is None and len(right.sampled_token_ids) == 1

    def test_two_executors_share_nothing(self, checkpoint: Path) -> None:
        with self.started(checkpoint) as (first, info):
            first.execute_model(self.prompt(1, info))
            expected = first.get_output().sampled_token_ids
            with self.started(checkpoint) as (second, _):
                first.execute_model(self.prompt(2, info))
                second.execute_model(self.prompt(1, info))
                assert second.get_output().sampled_token_ids == expected
                assert first.get_output().id == 2
            first.check_health()
            first.execute_model(self.prompt(1, info))
            assert first.get_output().sampled_token_ids == expected, (
                "the end of another one is seen"
            )

    def test_it_leaves_nothing_behind(self, checkpoint: Path) -> None:
        before = {*threading.enumerate()}, _children()
        with closing(self.core(checkpoint, self.key, **self.engine)):
            pass
        remaining = [thread for thread in threading.enumerate() if thread not in before[0]]
        assert not remaining, "threads run on"
        assert not _children() - before[1], "processes run on"

    def test_a_failed_start_is_an_error_of_treadle(self, tmp_path: Path) -> None:
        with pytest.raises(TreadleError), self.started(tmp_path):
            pass

    def test_it_may_be_stopped_without_a_start(self, checkpoint: Path) -> None:
        config = self.config(checkpoint, self.key, **self.engine)
        self.plugin_manager().create(
            EXECUTORS, self.key, config=config, plugins=self.plugin_manager()
        ).shutdown()


def _children() -> set[str]:
    """Return the child processes of this process, if the system lists them."""
    threads = Path("/proc/self/task")
    files = threads.glob("*/children") if threads.is_dir() else ()
    return {pid for file in files for pid in file.read_text().split()}
