"""Programs for vLLM, run by treadle: what they import, and what their objects are like."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import runpy
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel
from repository import ROOT

import treadle.compat.vllm as vllm
from treadle.compat.vllm.sampling_params import GuidedDecodingParams, RequestOutputKind
from treadle.errors import ConfigError, RequestError, TreadleError

DEMO = "demo:treadle-demo"


@pytest.fixture(scope="module")
def llm() -> Any:
    return vllm.LLM(model=DEMO, swap_space=4, task=None, seed=None)


def test_a_module_has_one_name() -> None:
    from treadle.compat.vllm.engine.arg_utils import EngineArgs
    from treadle.compat.vllm.entrypoints.llm import LLM
    from treadle.compat.vllm.utils import FlexibleArgumentParser, argparse_utils

    assert (EngineArgs, LLM) == (vllm.EngineArgs, vllm.LLM)
    assert argparse_utils.FlexibleArgumentParser is FlexibleArgumentParser
    assert vllm.__name__ == "treadle.compat.vllm"
    assert importlib.import_module("treadle.compat.vllm.v1.engine.async_llm").AsyncLLM


@pytest.mark.own_python
def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, treadle.compat.vllm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_generate(llm: Any) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = 3, 0.0
    outputs = llm.generate(["Hello", "The capital of Italy is"], params, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["Hello", "The capital of Italy is"]
    for output in outputs:
        (completion,) = output.outputs
        assert output.finished and completion.finished() and completion.lora_request is None
        assert len(completion.token_ids) <= 3 and output.encoder_prompt is None
    ids = outputs[0].prompt_token_ids
    (again,) = llm.generate(prompt_token_ids=[ids], sampling_params=params, use_tqdm=False)
    assert again.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    (once_more,) = llm.generate({"prompt_token_ids": ids}, [params], use_tqdm=False)
    assert once_more.outputs[0].text == outputs[0].outputs[0].text


def test_chat(llm: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    params = vllm.SamplingParams(max_tokens=3)
    assert len(llm.chat([messages, messages], params, use_tqdm=False)) == 2
    with pytest.raises(RequestError, match=r"chat_template of LLM\.chat is not built yet"):
        llm.chat(messages, chat_template="{{ messages }}")


class Car(BaseModel):
    brand: str


def test_structured_outputs(llm: Any) -> None:
    params = vllm.SamplingParams(guided_decoding=GuidedDecodingParams(choice=["Yes", "No"]))
    (output,) = llm.generate("Well?", params, use_tqdm=False)
    assert output.outputs[0].text in ("Yes", "No")
    assert GuidedDecodingParams(json=Car).to_treadle().json == Car.model_json_schema()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.embed(["x"]), "LLM.embed is not built yet: embedding"),
        (lambda llm: llm.beam_search(["x"], None), "LLM.beam_search is not built yet"),
        (lambda llm: llm.generate("x", lora_request=object()), "lora_request of LLM.generate"),
        (lambda llm: llm.generate(), "give prompts or prompt_token_ids"),
        (lambda llm: llm.generate("x", {"n": 1}), "sampling_params is dict"),
        (lambda llm: vllm.SamplingParams(temperature=-1), "temperature is -1"),
        (lambda llm: vllm.SamplingParams(best_of=3), "best_of is 3 and n is 1"),
        (lambda llm: vllm.SamplingParams(logits_processors=[len]), "are functions in vLLM"),
        (lambda llm: vllm.EngineArgs(enable_lora=True), "option enable_lora is True"),
        (lambda llm: vllm.LLM(DEMO, pipeline_parallel_size=2), "pipeline_parallel_size is 2"),
    ],
)
def test_what_is_not_built_is_named(llm: Any, call: Any, message: str) -> None:
    with pytest.raises(TreadleError, match=message):
        call(llm)


def test_options_of_structured_outputs_are_passed_on() -> None:
    tag = '{"format": {"type": "any_text"}}'
    ours = GuidedDecodingParams(structural_tag=tag, backend="xgrammar:no-fallback").to_treadle()
    assert (ours.structural_tag, ours.backend) == (tag, "xgrammar")
    old = GuidedDecodingParams(
        regex="a", backend="guidance:disable-any-whitespace,no-additional-properties"
    )
    ours = old.to_treadle()
    assert (ours.backend, ours.disable_any_whitespace) == ("guidance", True)
    assert ours.disable_additional_properties
    given = GuidedDecodingParams(
        json={"type": "object"},
        disable_fallback=True,
        disable_any_whitespace=True,
        disable_additional_properties=True,
    )
    ours = given.to_treadle()
    assert ours.disable_any_whitespace and ours.disable_additional_properties


def test_metrics(llm: Any) -> None:
    from treadle.compat.vllm.v1.metrics.reader import Counter, Gauge, Histogram

    def read() -> dict[tuple[str, str], Any]:
        metrics = llm.get_metrics()
        return {(m.name, m.labels.get("finished_reason", "")): m for m in metrics}

    before = read()
    llm.generate("One two", vllm.SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    after = read()
    assert all(isinstance(m, Counter | Gauge | Histogram) for m in after.values())

    def grown(name: str, reason: str = "") -> int:
        return int(after[name, reason].value - before[name, reason].value)

    assert grown("vllm:generation_tokens") == 3 and grown("vllm:prompt_tokens") > 0
    assert grown("vllm:request_success", "length") == 1 and not grown("vllm:num_preemptions")
    steps = after["vllm:iteration_tokens_total", ""]
    assert steps.count == steps.buckets["+Inf"] > 0 and steps.sum >= steps.count
    assert after["vllm:num_requests_running", ""].value == 0


def test_an_unknown_attribute_is_not_an_option(llm: Any) -> None:
    assert not hasattr(llm, "no_such_thing")
    assert not hasattr(vllm.EngineArgs(DEMO), "no_such_thing")


def test_a_wrong_request_raises(llm: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate("x", vllm.SamplingParams(allowed_token_ids=[10**6]), use_tqdm=False)


def test_engine_args_as_flags() -> None:
    from treadle.compat.vllm.utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    group = parser.add_argument_group("Engine arguments")
    vllm.EngineArgs.add_cli_args(group)
    group.set_defaults(model=DEMO)
    parser.add_argument("--top-p", type=float)
    texts = "--max_model_len 1k -tp 1 --dtype half --no-enable-prefix-caching --top_p=0.5"
    args = parser.parse_args([*texts.split(), "--served-model-name", "a", "b", "--swap-space", "4"])
    assert args.top_p == 0.5
    engine_args = vllm.EngineArgs.from_cli_args(args)
    assert (engine_args.model, engine_args.max_model_len) == (DEMO, "1k")
    assert engine_args.served_model_name == ["a", "b"]
    assert engine_args.enable_prefix_caching is False
    assert engine_args.quantization is None
    with pytest.raises(ConfigError, match="option enable_lora is True"):
        vllm.EngineArgs.from_cli_args(argparse.Namespace(enable_lora=True))


def test_llm_engine() -> None:
    engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(DEMO, max_num_seqs=4))
    engine.add_request("a", "Hello", vllm.SamplingParams(max_tokens=3, logprobs=1))
    engine.add_request("b", "Hello", vllm.SamplingParams(max_tokens=2, n=2, ignore_eos=True))
    engine.add_request("c", "Hello", vllm.SamplingParams(max_tokens=900, ignore_eos=True))
    with pytest.raises(RequestError, match="request_id 'a' is in use"):
        engine.add_request("a", "Hello", vllm.SamplingParams())
    finished = {}
    while engine.get_num_unfinished_requests() > 1:
        finished |= {o.request_id: o for o in engine.step() if o.finished}
    assert sorted(finished) == ["a", "b"] and len(finished["b"].outputs) == 2
    assert finished["a"].outputs[0].logprobs is not None
    engine.abort_request("c")
    engine.abort_request("nobody")
    assert not engine.has_unfinished_requests() and engine.step() == []
    assert engine.engine.stats.num_running == 0


def test_async_engine() -> None:
    async def run() -> tuple[str, Any]:
        engine = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(model=DEMO))
        params = vllm.SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA)
        texts = []
        async for output in engine.generate("Hello", params, request_id="r"):
            assert output.request_id == "r"
            texts.append(output.outputs[0].text)
        engine.shutdown()
        return "".join(texts), engine.engine._client._child

    text, child = asyncio.run(run())
    assert text and child.poll() is not None


SCRIPT = """
import vllm
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
llm = LLM(model="facebook/opt-125m", gpu_memory_utilization=0.4)
print(llm.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished)
del llm
cleanup_dist_env_and_memory()
"""


def test_a_script_of_vllm_runs(tmp_path: Any) -> None:
    file = tmp_path / "script.py"
    examples = runpy.run_path(str(ROOT / "tests/compat/run_examples.py"))
    file.write_text(examples["ported"](SCRIPT))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
