"""Models, attention, quantization and kernels that fail in a step: its requests end with the cause,
everybody else goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import (
    EXPERTS,
    USE,
    calls,
    config,
    create_plugins,
    failure_pattern,
    finish,
    healthy,
    name,
)

from treadle import LLM, SamplingParams
from treadle.api.attention import SupportsOutputBuffer
from treadle.api.kinds import ATTENTION_BACKENDS
from treadle.errors import EngineDeadError, EngineError, PluginLoadError
from treadle.testing.attention import AttentionCase, requests

fault = pytest.mark.fault
Odd = Callable[..., LLM]

# kind, method, the word for it in messages, the call that fails: one in the middle of an answer
METHODS = [
    pytest.param("models", "forward", "forward", 3, marks=fault("models", "forward")),
    pytest.param(
        "models", "compute_logits", "compute_logits", 3, marks=fault("models", "compute_logits")
    ),
    pytest.param(
        "attention_backends",
        "build_metadata",
        "build_metadata",
        3,
        marks=fault("attention_backends", "build_metadata"),
    ),
    pytest.param(
        "attention_backends", "forward", "forward", 20, marks=fault("attention_backends", "forward")
    ),
    pytest.param("quantization", "apply", "apply", 70, marks=fault("quantization", "apply")),
    pytest.param(
        "quantization",
        "apply_gated",
        "apply_gated",
        5,
        marks=fault("quantization", "apply_gated"),
    ),
    pytest.param("kernel_ops", "call", "rms_norm", 3, marks=fault("kernel_ops", "call")),
]


@pytest.mark.parametrize("failure", ["RuntimeError", "Panic", "RequestError"])
@pytest.mark.parametrize(("kind", "method", "word", "first_call"), METHODS)
def test_a_failed_step_fails_its_requests_and_no_others(
    odd: Odd, expected: list[int], kind: str, method: str, word: str, first_call: int, failure: str
) -> None:
    llm = odd(kind, method, failure, first_call=first_call, times=1)
    for output in finish(llm, {}, {}):
        assert output.finish_reason == "error" and len(output.token_ids) < 6
        assert output.token_ids == expected[: len(output.token_ids)]
        assert output.error is not None
        _matches(output.error, f"the step failed: {failure_pattern(kind, word, f'{failure}: odd')}")
    assert calls(llm, kind, word)["error"] == 1
    healthy(llm, expected)
    assert llm.stats.plugin_states[name(kind)] == "loaded", "one fault is no reason to give it up"


@pytest.mark.parametrize(("kind", "method", "word", "first_call"), METHODS)
def test_in_strict_mode_a_failed_step_ends_the_engine(
    odd: Odd, kind: str, method: str, word: str, first_call: int
) -> None:
    llm = odd(kind, method, first_call=first_call, times=1, plugin_strict=True)
    with pytest.raises(
        EngineError, match=f"{failure_pattern(kind, word)} .plugin_strict makes it fatal"
    ):
        finish(llm, {})
    with pytest.raises(
        EngineDeadError, match=f"the engine has failed .*{failure_pattern(kind, word)}"
    ):
        finish(llm, {})


@pytest.mark.parametrize(("kind", "method", "word", "first_call"), METHODS)
def test_requests_that_are_not_in_the_step_go_on(
    odd: Odd, expected: list[int], kind: str, method: str, word: str, first_call: int
) -> None:
    """There is room for one request in a step: the others wait, and are served."""
    llm = odd(kind, method, first_call=first_call, times=1, max_num_seqs=1)
    outputs = finish(llm, {}, {}, {})
    assert [o.finish_reason for o in outputs] == ["error", "length", "length"]
    assert [o.token_ids for o in outputs[1:]] == [expected] * 2
    healthy(llm, expected)


@pytest.mark.parametrize(("kind", "method", "word", "first_call"), METHODS)
def test_a_step_that_is_launched_before_the_failed_one_is_collected(
    odd: Odd, expected: list[int], kind: str, method: str, word: str, first_call: int
) -> None:
    """As on a GPU: the next step is on its way, with sequences that have ended when it is collected."""
    fault = {name(kind): {"method": method, "first_call": first_call, "times": 1}}
    llm = odd("executors", "start", "deep", others=fault, **USE[kind])
    assert llm.info.num_async_steps == 1
    for output in finish(llm, {}, {}):
        assert output.finish_reason == "error"
        assert output.token_ids == expected[: len(output.token_ids)]
        _matches(str(output.error), f"the step failed: {failure_pattern(kind, word)}")
    assert calls(llm, kind, word)["error"] == 1
    healthy(llm, expected)


WRONG = [
    (
        "models",
        "forward",
        "forward",
        "None",
        r"it returned None; a tensor \[\d, hidden\] was expected",
    ),
    ("models", "forward", "forward", "text", "it returned 'odd'"),
    ("models", "forward", "forward", "few", r"it returned a tensor \[\d, 256\]"),
    (
        "models",
        "compute_logits",
        "compute_logits",
        "None",
        r"it returned None; a tensor \[2, 4096\] was expected",
    ),
    (
        "models",
        "compute_logits",
        "compute_logits",
        "narrow",
        r"a tensor \[2, 4095\]; a tensor \[2, 4096\]",
    ),
    (
        "models",
        "compute_logits",
        "compute_logits",
        "few",
        r"a tensor \[1, 4096\]; a tensor \[2, 4096\]",
    ),
    (
        "attention_backends",
        "forward",
        "forward",
        "None",
        "'NoneType' object has no attribute 'shape'",
    ),
    (
        "attention_backends",
        "forward",
        "forward",
        "narrow",
        r"a tensor \[\d, 4, 63\]; a tensor \[\d, 4, 64\]",
    ),
    (
        "attention_backends",
        "forward",
        "forward",
        "few",
        r"a tensor \[\d, 4, 64\]; a tensor \[\d, 4, 64\]",
    ),
    ("quantization", "apply", "apply", "None", "'NoneType' object has no attribute 'shape'"),
    ("quantization", "apply", "apply", "narrow", "a tensor whose last size is"),
    ("quantization", "apply_gated", "apply_gated", "narrow", "a tensor whose last size is"),
    ("kernel_ops", "call", "rms_norm", "None", "it returned None; a result was expected"),
]


@pytest.mark.parametrize(("kind", "method", "word", "failure", "words"), WRONG)
def test_a_method_that_returns_something_else_fails_its_step(
    odd: Odd, expected: list[int], kind: str, method: str, word: str, failure: str, words: str
) -> None:
    llm = odd(kind, method, failure, times=1)
    for output in finish(llm, {}, {}):
        assert output.finish_reason == "error" and output.error is not None
        _matches(output.error, f"the step failed: {failure_pattern(kind, word, '')}.*{words}.*")
    assert calls(llm, kind, word)["error"] == 1
    healthy(llm, expected)


TENSORS = [p.values for p in METHODS if p.values[1] != "build_metadata"]


@pytest.mark.parametrize(("kind", "method", "word", "first_call"), TENSORS)
def test_results_that_are_no_numbers_fail_the_request(
    odd: Odd, expected: list[int], kind: str, method: str, word: str, first_call: int
) -> None:
    llm = odd(kind, method, "NaN", first_call=first_call, times=1)
    for output in finish(llm, {}, {}):
        assert output.finish_reason == "error" and "no token can be sampled" in str(output.error)
    healthy(llm, expected)


@fault("models", "compute_logits")
def test_a_neighbour_of_a_row_without_numbers_does_not_notice(
    odd: Odd, expected: list[int]
) -> None:
    llm = odd("models", "compute_logits", "one NaN", first_call=3, times=1)
    bad, good = finish(llm, {}, {})
    assert bad.finish_reason == "error" and bad.token_ids == expected[:2]
    assert good.finish_reason == "length" and good.token_ids == expected
    healthy(llm, expected)


@fault("quantization", "apply")
def test_experts_that_raise_fail_their_step(odd: Odd) -> None:
    """Each layer calls three methods in a step: two of matrices, then that of its experts."""
    llm = odd("quantization", "apply", first_call=3, times=1, **EXPERTS)
    (output,) = finish(llm, {})
    _matches(str(output.error), f"the step failed: {failure_pattern('quantization', 'apply')}")
    (output,) = finish(llm, {})
    assert output.finish_reason == "length" and llm.stats.num_used_pages == 0


@fault("attention_backends", "slot_mapping")
@pytest.mark.parametrize("failure", ["RuntimeError", "Panic"])
def test_a_writer_that_raises_fails_its_step(odd: Odd, expected: list[int], failure: str) -> None:
    """Slots are asked for where a kernel writes keys and values."""
    kernel = {"kernel_ops:odd": {"method": "never"}}
    llm = odd("attention_backends", "slot_mapping", failure, first_call=20, times=1, others=kernel)
    assert any("rope_and_cache by odd" in line for line in llm.info.report)
    for output in finish(llm, {}, {}):
        _matches(
            str(output.error),
            f"the step failed: {failure_pattern('attention_backends', 'slot_mapping', f'{failure}: odd')}",
        )
    assert calls(llm, "attention_backends", "slot_mapping") == {"error": 1}
    healthy(llm, expected)


@fault("attention_backends", "forward_into")
@pytest.mark.parametrize("failure", ["RuntimeError", "Panic"])
def test_a_backend_that_cannot_write_a_result_is_named(failure: str) -> None:
    """It is asked to between the pieces of a captured prompt, which a CPU has not."""
    kind = "attention_backends"
    plugins = create_plugins(config(kind, "forward_into", failure, times=1))
    request = requests["float32"]
    offer = plugins.best_offer(ATTENTION_BACKENDS, "odd", request=request)
    assert offer is not None
    backend: Any = offer.create()
    assert isinstance(backend, SupportsOutputBuffer)
    case = AttentionCase(request, [3], [3], offer.page_sizes[0], device="cpu")
    cache = case.cache(backend)
    out, plan = torch.zeros_like(case.q), backend.build_metadata(case.batch)
    pattern = failure_pattern(kind, "forward_into", f"{failure}: odd")
    with pytest.raises(PluginLoadError, match=pattern):
        backend.forward_into(out, case.q, case.k, case.v, cache, plan)
    backend.forward_into(out, case.q, case.k, case.v, cache, plan)
    case.check(out)
    assert calls(plugins, kind, "forward_into") == {"error": 1}


@fault("models", "forward", "compute_logits")
@pytest.mark.parametrize("method", ["forward", "compute_logits"])
def test_an_interrupt_in_a_step_is_the_users(odd: Odd, method: str) -> None:
    """It leaves half a step: nothing of that engine can be trusted, and it says so."""
    llm = odd("models", method, "KeyboardInterrupt", first_call=3, times=1)
    with pytest.raises(KeyboardInterrupt):
        finish(llm, {})
    with pytest.raises(EngineDeadError, match="a step was left in the middle by KeyboardInterrupt"):
        finish(llm, {})


@fault("models", "forward")
def test_a_stream_ends_with_the_cause(odd: Odd, expected: list[int]) -> None:
    llm = odd("models", "forward", first_call=3, times=1)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    *_, last = llm.stream([[312, 284, 223, 1540]], params)
    assert last.outputs[0].token_ids == expected[:2]
    _matches(str(last.outputs[0].error), f"the step failed: {failure_pattern('models', 'forward')}")


def _matches(text: str, pattern: str) -> None:
    import re

    assert re.fullmatch(pattern, text), f"{text!r} is not {pattern!r}"
