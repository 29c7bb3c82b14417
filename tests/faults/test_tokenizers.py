"""A tokenizer that fails while requests are served: the request whose text it is pays."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from engines import PROMPT, calls, failure_pattern, finish, healthy

from treadle import LLM, SamplingParams
from treadle.errors import PluginLoadError

fault = pytest.mark.fault
Odd = Callable[..., LLM]

RAISE = [("RuntimeError", "RuntimeError: odd"), ("Panic", "Panic: odd")]
PARAMS = {"token_bytes": {"logprobs": 2}, "decode_next": {"stop": "nothing like it"}}
"""What makes a method of those for one token necessary."""


@fault("tokenizers", "encode")
@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        *RAISE,
        ("None", "TypeError: it returned None; a list of ints was expected"),
        ("text", "TypeError: it returned 'odd'; a list of ints was expected"),
    ],
)
def test_a_prompt_that_cannot_be_encoded_is_its_requests_error(
    odd: Odd, expected: list[int], failure: str, cause: str
) -> None:
    llm = odd("tokenizers", "encode", failure, first_call=2, times=1)
    for prompts in (["fine"], [PROMPT]):
        assert llm.generate(prompts, use_tqdm=False)[0].outputs[0].error is None
    with pytest.raises(PluginLoadError, match=failure_pattern("tokenizers", "encode", cause)):
        llm.generate(["odd"], use_tqdm=False)
    assert llm.generate(["fine"], use_tqdm=False)[0].outputs[0].error is None
    healthy(llm, expected)


@fault("tokenizers", "encode")
def test_bad_words_that_cannot_be_encoded_are_their_requests_error(
    odd: Odd, expected: list[int]
) -> None:
    llm = odd("tokenizers", "encode")
    with pytest.raises(PluginLoadError, match=failure_pattern("tokenizers", "encode")):
        finish(llm, {"bad_words": ["odd"]})
    healthy(llm, expected)


@fault("tokenizers", "create_detokenizer")
@pytest.mark.parametrize(("failure", "cause"), RAISE)
def test_an_output_that_cannot_be_begun_is_its_requests_error(
    odd: Odd, expected: list[int], failure: str, cause: str
) -> None:
    llm = odd("tokenizers", "create_detokenizer", failure, times=1)
    with pytest.raises(
        PluginLoadError, match=failure_pattern("tokenizers", "create_detokenizer", cause)
    ):
        finish(llm, {})
    healthy(llm, expected)


@pytest.mark.parametrize(
    ("method", "failure", "cause"),
    [
        pytest.param("decode_next", *RAISE[0], marks=fault("tokenizers", "decode_next")),
        pytest.param("decode_next", *RAISE[1]),
        pytest.param("decode_next", "None", "TypeError: it returned None; a str was expected"),
        pytest.param("decode_next", "False", "TypeError: it returned False; a str was expected"),
        pytest.param("decode_many", *RAISE[0], marks=fault("tokenizers", "decode_many")),
        pytest.param("decode_many", *RAISE[1]),
        pytest.param("decode_many", "None", "TypeError: it returned None; a str was expected"),
        pytest.param("flush", *RAISE[0], marks=fault("tokenizers", "flush")),
        pytest.param("flush", *RAISE[1]),
        pytest.param("flush", "None", "TypeError: it returned None; a str was expected"),
        pytest.param("token_bytes", *RAISE[0], marks=fault("tokenizers", "token_bytes")),
        pytest.param("token_bytes", *RAISE[1]),
        pytest.param("token_bytes", "text", "TypeError: it returned 'odd'; bytes was expected"),
    ],
)
def test_an_output_whose_text_cannot_be_made_ends_alone(
    odd: Odd, expected: list[int], method: str, failure: str, cause: str
) -> None:
    """The first of two outputs; the tokens of the other are what they would be."""
    llm = odd("tokenizers", method, failure, times=1)
    params = PARAMS.get(method, {})
    bad, good = finish(llm, params, params)
    assert good.token_ids == expected and good.error is None and good.text
    assert bad.finish_reason == "error"
    pattern = "the text of this output could not be made: " + failure_pattern(
        "tokenizers", method, cause
    )
    assert re.fullmatch(pattern, str(bad.error)), bad.error
    healthy(llm, expected)


@fault("tokenizers", "flush")
def test_an_output_that_is_ended_early_may_fail_too(odd: Odd, expected: list[int]) -> None:
    """What was held back is asked for when a request is aborted."""
    llm = odd("tokenizers", "flush", times=1)
    stream = llm.stream([PROMPT], SamplingParams(max_tokens=50, ignore_eos=True))
    request = next(stream).request_id
    llm._core.abort_requests(llm._outputs.abort(request))
    last = next(stream).outputs[0]
    assert last.finish_reason == "error"
    assert re.search(failure_pattern("tokenizers", "flush"), str(last.error))
    healthy(llm, expected)


@fault("tokenizers", "vocab_size", "decode", "eos_token_id")
@pytest.mark.parametrize("method", ["vocab_size", "decode", "eos_token_id"])
def test_what_the_engine_does_not_ask_fails_nobody(
    odd: Odd, expected: list[int], method: str
) -> None:
    """These are for other plugins: compilers of grammars, parsers."""
    llm = odd("tokenizers", method)
    assert llm.generate(["hello"], use_tqdm=False)[0].outputs[0].error is None
    healthy(llm, expected)


@fault("tokenizers", "vocab_size")
def test_a_grammar_compiler_that_is_let_down_fails_its_request(
    odd: Odd, expected: list[int]
) -> None:
    from treadle.api.sampling_params import StructuredOutputsParams

    llm = odd("tokenizers", "vocab_size")
    backend = next(n for n in ("llguidance", "outlines", "lm-format-enforcer") if n in _guided(llm))
    guided = StructuredOutputsParams(regex="[a-z]+", backend=backend)
    bad, good = finish(llm, {"structured_outputs": guided}, {})
    assert bad.finish_reason == "error" and good.token_ids == expected
    assert f"structured_output:{backend}" in str(bad.error) and "RuntimeError: odd" in str(
        bad.error
    )
    healthy(llm, expected)


def _guided(llm: LLM) -> list[str]:
    return llm._core.plugins.keys("structured_output")


def test_calls_are_counted(odd: Odd) -> None:
    llm = odd("tokenizers", "never")
    llm.generate(["hello"], use_tqdm=False)
    assert calls(llm, "tokenizers", "encode") == {"ok": 1}
