"""The engine in its own process: streams, aborts, and every way in which a process can end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.api.sampling_params import SamplingParams
from treadle.entrypoints.async_llm import AsyncLLM
from treadle.errors import (
    CheckpointError,
    EngineDeadError,
    EngineError,
    QueueFullError,
    RequestError,
    TreadleError,
)
from treadle.outputs import RequestOutput

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)  # the engine process imports from where its parent does

from echo_core import BREAK, EXIT, FULL, HANG, KILL, RAISE, SLOW  # noqa: E402

ENTRY = "echo_core:main"
LONG = SamplingParams(max_tokens=4000, ignore_eos=True, output_kind="delta")


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(tokenizer=True)


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(folder), entry=ENTRY) as engine:
        yield engine


def gone(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process ends in time; a zombie counts as ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


async def collect(stream: Any) -> list[RequestOutput]:
    return [output async for output in stream]


def ids_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.outputs[0].token_ids]


# ------------------------------------------------------------------ the real engine


async def test_it_equals_the_engine_in_process(folder: Path) -> None:
    from treadle.entrypoints.llm import LLM

    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
    prompts: list[Any] = ["Hello", "The capital of France is", [1, 2, 3]]
    messages = [{"role": "user", "content": "hi"}]
    with LLM(str(folder), cpu_threads=1) as llm:
        expected = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        answer = llm.chat(messages, params, use_tqdm=False)[0].outputs[0]
    async with AsyncLLM(str(folder), cpu_threads=1) as engine:
        streams = await asyncio.gather(*(collect(engine.generate(p, params)) for p in prompts))
        chat = await collect(engine.chat(messages, params))
        assert engine.info.architecture == "LlamaForCausalLM"
        stats = await engine.stats()
        assert stats.generation_tokens == 24 and stats.num_running == 0
    for outputs, completion in zip([*streams, chat], [*expected, answer], strict=True):
        last = outputs[-1].outputs[0]
        assert (last.token_ids, last.text, last.finish_reason) == (
            completion.token_ids,
            completion.text,
            "length",
        )
        assert last.cumulative_logprob == pytest.approx(completion.cumulative_logprob, abs=1e-3)
        assert outputs[-1].finished and not any(o.finished for o in outputs[:-1])


PROGRAM = """
import asyncio
import sys
from treadle import AsyncLLM, SamplingParams

async def main():
    engine = AsyncLLM(sys.argv[1], cpu_threads=1)
    params = SamplingParams(max_tokens=2)
    async for output in engine.chat([{"role": "user", "content": "hi"}], params):
        pass
    assert output.finished
    engine.tokenizer.decode(output.outputs[0].token_ids)
    await engine.stats()
    await engine.shutdown()
    print([m for m in ("torch", "transformers", "numpy", "multiprocessing") if m in sys.modules])

asyncio.run(main())
"""


@pytest.mark.own_python
def test_the_api_process_imports_nothing_heavy(folder: Path) -> None:
    """Nor does it need a main guard, which multiprocessing would."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert process.stdout.strip() == "[]", process.stderr


# ------------------------------------------------------------------ streams


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
async def test_kinds_of_streams(served: AsyncLLM, kind: Any) -> None:
    params = SamplingParams(max_tokens=7, output_kind=kind)
    outputs = await collect(served.generate([72, 105], params, request_id="mine"))
    ids = ids_of(outputs) if kind == "delta" else outputs[-1].outputs[0].token_ids
    assert ids == [72, 105, 72, 105, 72, 105, 72]
    assert outputs[-1].finished and outputs[-1].request_id == "mine"


async def test_many_requests_at_once(served: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=20, n=2, output_kind="delta")
    results = await asyncio.gather(
        *(collect(served.generate([i, i + 1], params)) for i in range(1, 101))
    )
    for i, outputs in enumerate(results, start=1):
        for index in range(2):
            ids = [t for r in outputs for o in r.outputs if o.index == index for t in o.token_ids]
            assert ids == [i, i + 1] * 10
    assert served.unfinished == 0 and (await served.stats()).num_running == 0


async def test_a_slow_reader_gets_everything(served: AsyncLLM) -> None:
    stream = served.submit(
        await served.prepare([72, 105], SamplingParams(max_tokens=500, output_kind="delta"))
    )
    first = await anext(stream)
    while (await served.stats()).num_running:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    rest = await collect(stream)
    assert len(rest) <= 2, "what was not read is merged"
    assert ids_of([first, *rest]) == [72, 105] * 250


async def test_stop_strings_end_the_sequence_in_the_engine(served: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=4000, stop="lloH", ignore_eos=True)
    outputs = await collect(served.generate("Hello", params))
    assert outputs[-1].outputs[0].text == "He" and outputs[-1].outputs[0].stop_reason == "lloH"
    await served.health()
    assert (await served.stats()).num_running == 0


async def test_more_than_a_frame_holds(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.engine.client.FRAME_BYTES", 1000)
    params = SamplingParams(max_tokens=1)
    results = await asyncio.gather(
        *(collect(served.generate([i] * 900, params)) for i in range(1, 30))
    )
    assert [r[-1].outputs[0].token_ids for r in results] == [[i] for i in range(1, 30)]
    monkeypatch.setattr("treadle.engine.ipc.MAX_FRAME_BYTES", 2000)
    with pytest.raises(RequestError, match="at most 1000"):
        await collect(served.generate([300] * 900, params))
    assert await collect(served.generate([1], params))


async def test_a_high_descriptor_in_the_child(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        async with AsyncLLM(str(folder), entry=ENTRY) as engine:
            assert await collect(engine.generate([1], SamplingParams(max_tokens=3)))
    finally:
        for fd in descriptors:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ------------------------------------------------------------------ leaving early


async def until_idle(served: AsyncLLM) -> None:
    async with asyncio.timeout(5):
        while (await served.stats()).num_running:
            await asyncio.sleep(0.01)


async def test_leaving_the_loop_aborts(served: AsyncLLM) -> None:
    stream = served.generate([SLOW, 1], LONG)
    async for _ in stream:
        break
    await stream.aclose()
    await until_idle(served)
    assert served.unfinished == 0


async def test_cancelling_the_task_aborts(served: AsyncLLM) -> None:
    tasks = [asyncio.create_task(collect(served.generate([SLOW, 1], LONG))) for _ in range(3)]
    await asyncio.sleep(0.1)
    assert (await served.stats()).num_running == 3
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.sleep(0.1)
    assert (await served.stats()).num_running == 1
    tasks[1].cancel()
    await until_idle(served)
    assert all(t.cancelled() for t in await asyncio.wait(tasks) and tasks)


async def test_abort_by_id_ends_the_stream(served: AsyncLLM) -> None:
    outputs = []
    async for output in served.generate([SLOW, 1], LONG, request_id="victim"):
        outputs.append(output)
        served.abort("victim")
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
    served.abort("nobody")
    await until_idle(served)


async def test_a_stream_that_is_never_read_can_be_closed(served: AsyncLLM) -> None:
    stream = served.submit(await served.prepare([SLOW, 1], LONG))
    await stream.aclose()
    await stream.aclose()
    await until_idle(served)
    assert await collect(stream) == [] and served.unfinished == 0


# ------------------------------------------------------------------ wrong requests


async def test_wrong_requests_raise_and_nobody_else_notices(served: AsyncLLM) -> None:
    neighbour = asyncio.create_task(
        collect(served.generate([SLOW, 1], SamplingParams(max_tokens=30)))
    )
    for prompt, kind in (
        ("", RequestError),
        ([10**6], RequestError),
        ({"promt": 1}, RequestError),
        ([FULL], QueueFullError),
    ):
        with pytest.raises(kind):
            await collect(served.generate(prompt, SamplingParams(n=2)))
    with pytest.raises(EngineError, match="failed to add this request") as exc_info:
        await collect(served.generate([BREAK]))
    assert "secret" not in str(exc_info.value), "the bug is in the log, not in the answer"
    assert (await neighbour)[-1].finished
    await served.health()


async def test_an_id_in_use_is_refused(served: AsyncLLM) -> None:
    first = served.submit(await served.prepare([SLOW, 1], LONG, request_id="x"))
    with pytest.raises(RequestError, match="'x'") as exc_info:
        await collect(served.generate([1], request_id="x"))
    assert exc_info.value.param == "request_id"
    await first.aclose()
    assert await collect(served.generate([1], SamplingParams(max_tokens=1), request_id="x"))


async def test_more_than_the_engine_could_queue_is_refused_here(folder: Path) -> None:
    async with AsyncLLM(str(folder), entry=ENTRY, max_num_queued_reqs=2, max_num_seqs=2) as engine:
        streams = [engine.submit(await engine.prepare([SLOW, 1], LONG)) for _ in range(4)]
        with pytest.raises(QueueFullError, match="4 sequences"):
            await collect(engine.generate([1]))
        for stream in streams:
            await stream.aclose()
        assert await collect(engine.generate([1], SamplingParams(max_tokens=1)))


# ------------------------------------------------------------------ ends of the process


@pytest.mark.parametrize(
    ("command", "reason"), [(RAISE, "a kernel failed"), (EXIT, "status 3"), (KILL, "SIGKILL")]
)
async def test_a_dead_engine_fails_every_request_at_once(
    served: AsyncLLM, command: int, reason: str
) -> None:
    waiting = [asyncio.create_task(collect(served.generate([SLOW, i], LONG))) for i in range(1, 4)]
    await asyncio.sleep(0.05)
    start_time = time.monotonic()
    with pytest.raises(EngineDeadError, match=reason):
        await collect(served.generate([command, 1], LONG))
    for task in waiting:
        with pytest.raises(EngineDeadError, match=reason):
            await task
    assert time.monotonic() - start_time < 20
    assert not served.alive and served.unfinished == 0
    for call in (served.health, served.stats, lambda: collect(served.generate([1]))):
        with pytest.raises(EngineDeadError, match=reason):
            await call()
    assert served._client.pid is not None and gone(served._client.pid)


async def test_a_hanging_engine_is_not_healthy(served: AsyncLLM) -> None:
    task = asyncio.create_task(collect(served.generate([HANG, 1], LONG)))
    await asyncio.sleep(0.2)
    with pytest.raises(EngineDeadError, match=r"not answered for 0\.3 s"):
        await served.health(timeout=0.3)
    assert served.alive
    task.cancel()
    pid = served._client.pid
    await served._client.stop(seconds=0.2)
    assert pid is not None and gone(pid)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("missing", CheckpointError, "^no weights in /nowhere$"),
        ("broken", EngineError, "ZeroDivisionError: a bug"),
        ("exit", EngineDeadError, "status 7"),
    ],
)
async def test_failures_of_the_start_travel_back(
    folder: Path, name: str, kind: type[TreadleError], message: str
) -> None:
    engine = AsyncLLM(str(folder), entry=ENTRY, served_model_name=[name])
    for _ in range(2):
        with pytest.raises(kind, match=message) as exc_info:
            await engine.start()
        assert type(exc_info.value) is kind
    assert engine._client.pid is not None and gone(engine._client.pid)
    await engine.shutdown()


async def test_a_wrong_model_raises_the_same_error_as_in_process(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path / "nothing")):
        await AsyncLLM(str(tmp_path / "nothing"), entry=ENTRY).start()


async def test_a_cancelled_start_leaves_no_process(folder: Path) -> None:
    engine = AsyncLLM(str(folder), entry=ENTRY, served_model_name=["slow"])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.start(), 0.5)
    pid = engine._client.pid
    await engine.shutdown()
    assert pid is not None and gone(pid)


async def test_a_shutdown_during_the_start_is_told_to_all_who_wait_for_it(folder: Path) -> None:
    """Nobody has cancelled them: a ``CancelledError`` would end their tasks without a word."""
    engine = AsyncLLM(str(folder), entry=ENTRY, served_model_name=["slow"])
    waiting = [
        asyncio.create_task(engine.start()),
        asyncio.create_task(engine.prepare("Hello")),
        asyncio.create_task(anext(engine.generate("Hello"))),
    ]
    while engine._client.pid is None:
        await asyncio.sleep(0.01)
    await engine.shutdown()
    for task in waiting:
        with pytest.raises(EngineDeadError, match="shut down while it was starting"):
            await task
    with pytest.raises(EngineDeadError, match="shut down while it was starting"):
        await engine.start()
    assert gone(engine._client.pid)


async def test_what_is_shut_down_is_not_started_by_a_late_request(folder: Path) -> None:
    """Nobody would end that process."""
    engine = AsyncLLM(str(folder), entry=ENTRY)
    await engine.shutdown()
    for late in (
        engine.start(),
        engine.prepare("Hello"),
        anext(engine.generate("Hello")),
        anext(engine.chat([{"role": "user", "content": "Hello"}])),
        engine.render([{"role": "user", "content": "Hello"}]),
        engine.health(),
    ):
        with pytest.raises(EngineDeadError, match="shut down"):
            await late
    assert engine._client.pid is None


async def test_before_the_start(folder: Path) -> None:
    engine = AsyncLLM(str(folder), entry=ENTRY)
    for call in (
        lambda: engine.info,
        lambda: engine.tokenizer,
        engine.get_default_sampling_params,
    ):
        with pytest.raises(EngineDeadError, match="not started"):
            call()
    with pytest.raises(EngineDeadError, match="not started"):
        await engine.health()
    await engine.shutdown()


async def test_shutdown_answers_pending_readers(folder: Path) -> None:
    engine = AsyncLLM(str(folder), entry=ENTRY)
    task = asyncio.create_task(collect(engine.generate([SLOW, 1], LONG)))
    while not engine.unfinished:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    pid = engine._client.pid
    start_time = time.monotonic()
    await engine.shutdown()
    assert (await task)[-1].outputs[0].finish_reason == "abort"
    assert pid is not None and gone(pid, 10) and time.monotonic() - start_time < 20
    await engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(engine.generate([1]))


async def test_signals_of_a_terminal_leave_the_engine_alone(served: AsyncLLM) -> None:
    pid = served._client.pid
    assert pid is not None and os.getpgid(pid) != os.getpgid(0), "Control-C goes to a group"
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert (
        ids_of(
            await collect(served.generate([7], SamplingParams(max_tokens=3, output_kind="delta")))
        )
        == [7] * 3
    )


ORPHAN = """
import asyncio, os, sys, time
sys.path.insert(0, {here!r})
from treadle import AsyncLLM, SamplingParams

async def main():
    engine = AsyncLLM({folder!r}, entry="echo_core:main")
    await engine.start()
    stream = engine.generate([{prompt}, 1], SamplingParams(max_tokens=4000, ignore_eos=True))
    await anext(stream)
    print(engine._client.pid, flush=True)
    if sys.argv[1] == "raise":
        await asyncio.sleep(0.5)
        raise RuntimeError("the server crashed")
    if sys.argv[1] == "fork" and os.fork() == 0:
        time.sleep(20)  # an heir that holds the socket open
    await asyncio.sleep(20)

asyncio.run(main())
"""


@pytest.mark.own_python
@pytest.mark.parametrize("parent_end", ["raise", "kill", "fork"])
def test_no_engine_outlives_its_parent(folder: Path, parent_end: str) -> None:
    program = textwrap.dedent(
        ORPHAN.format(here=HERE, folder=str(folder), prompt=SLOW if parent_end != "fork" else 5)
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, parent_end], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid, 0.1)
        if parent_end != "raise":
            parent.kill()
        assert gone(pid, 8.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        with parent:  # closes its pipe
            parent.wait()
