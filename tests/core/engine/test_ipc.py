"""Frames and messages between the API process and the engine process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle import errors
from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.config import from_options
from treadle.engine.ipc import (
    AbortRequests,
    AddRequests,
    RequestRejected,
    StartEngine,
    StepOutputs,
    decode_command,
    decode_report,
    decode_request,
    encode_request,
)
from treadle.errors import EngineError, RequestError
from treadle.processes.failure import Failure
from treadle.processes.framing import FrameDecoder, encode_frame


@given(st.lists(st.lists(st.integers(0, 2**31), max_size=40), max_size=6), st.integers(1, 50))
def test_frames_survive_any_chunking(lists: list[list[int]], size: int) -> None:
    messages = [StepOutputs([TokenOutput("a", ids, "stop", 3)]) for ids in lists]
    data = b"".join(map(encode_frame, messages))
    frames = FrameDecoder()
    reports = [
        decode_report(p) for i in range(0, len(data), size) for p in frames.feed(data[i : i + size])
    ]
    assert reports == messages


def test_commands_arrive_as_they_were_sent() -> None:
    params = SamplingParams(
        n=2, stop=["a", "b"], logit_bias={3: -1.5}, structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        extra_args={"p": {"x": [1, None]}}, seed=2**62, output_kind="delta", temperature=0.25,
    )  # fmt: skip
    request = EngineRequest(
        "1", [1, 2**20], params, 1.5, index=1, prefix_leader="0", bad_words=[[1], [2, 3]]
    )
    config = from_options(
        model="x",
        hf_overrides={"a": {"b": 1}},
        plugin_options={"k:v": {"o": 1}},
        max_num_queued_reqs=3,
    )
    for command in (StartEngine(config), AbortRequests(["a", "b"])):
        (payload,) = FrameDecoder().feed(bytes(encode_frame(command)))
        assert decode_command(payload) == command
    frame = encode_frame(AddRequests([encode_request(request), encode_request(request)]))
    (payload,) = FrameDecoder().feed(bytes(frame))
    command = decode_command(payload)
    assert isinstance(command, AddRequests)
    assert [decode_request(data) for data in command.requests] == [request, request]


def test_an_absurd_frame_is_refused() -> None:
    with pytest.raises(EngineError, match="4294967295 bytes"):
        list(FrameDecoder().feed(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_keep_their_class(name: str) -> None:
    kind = getattr(errors, name)
    error = (
        kind("what happened", param="p")
        if issubclass(kind, RequestError)
        else kind("what happened")
    )
    (payload,) = FrameDecoder().feed(bytes(encode_frame(RequestRejected("1", Failure.of(error)))))
    report = decode_report(payload)
    assert isinstance(report, RequestRejected)
    decoded = report.failure.error()
    assert type(decoded) is kind and str(decoded) == "what happened"
    assert getattr(decoded, "param", None) == getattr(error, "param", None)


def test_other_errors_become_engine_errors() -> None:
    assert type(Failure.of(OSError("disk")).error()) is EngineError
    assert str(Failure.of(OSError("disk")).error()) == "OSError: disk"
    assert type(Failure("os.system", "x").error()) is EngineError
