"""What the engine core promises its callers, on a tiny model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.api.kinds import SCHEDULING_POLICIES
from treadle.api.sampling_params import SamplingParams
from treadle.errors import ConfigError, ContextLengthError, QueueFullError, RequestError
from treadle.testing.introspection import hook_calls

PROMPT = [5, 9, 200, 17, 33, 4, 90, 12]


def generate(driven: Any, name: str = "r", prompt: list[int] = PROMPT, **params: Any) -> list[int]:
    driven.add(name, prompt, **params)
    driven.run()
    return driven.tokens[name]


def test_no_hook_is_called_in_a_step(engine: Any, checkpoint: Any) -> None:
    driven = engine(checkpoint())
    driven.add("a", PROMPT, max_tokens=8, ignore_eos=True, logprobs=1)
    driven.add("b", PROMPT, max_tokens=8, ignore_eos=True, temperature=0.7, top_p=0.9)
    with hook_calls(driven.core.plugins) as fired:
        driven.run()
    assert fired == []
    with hook_calls(driven.core.plugins) as fired:
        driven.core.plugins.create(SCHEDULING_POLICIES, "fcfs")
    assert fired  # the monitor works


@pytest.mark.parametrize(("count", "others"), [(0, False), (375, False), (100_000, True)])
def test_collections_leave_out_what_the_start_has_made_until_the_end(
    engine: Any, checkpoint: Any, count: int, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless somebody has frozen objects before, who then decides. Python 3.12 begins with 375."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    driven = engine(checkpoint())
    expected = [] if others else ["freeze"]
    assert calls[-1:] == expected
    calls.clear()
    shutdown = driven.core._executor.shutdown
    monkeypatch.setattr(driven.core._executor, "shutdown", lambda: calls.append("shutdown"))
    driven.core.close()  # an executor can only collect what is not frozen
    assert calls == (["shutdown"] if others else ["unfreeze", "shutdown"])
    driven.core.close()
    assert calls.count("shutdown") == 1
    shutdown()


def test_stop_ids_and_min_tokens(engine: Any, checkpoint: Any) -> None:
    driven = engine(checkpoint())
    greedy = generate(driven, max_tokens=12, ignore_eos=True)
    stop = next(t for t in greedy[3:] if t not in greedy[:3])
    index = greedy.index(stop)
    assert (
        generate(driven, "s", max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
        == greedy[: index + 1]
    )
    assert driven.reasons["s"] == "stop"
    later = generate(
        driven, "m", max_tokens=12, ignore_eos=True, stop_token_ids=[stop], min_tokens=index + 3
    )
    assert len(later) >= index + 3 and stop not in later[: index + 3]


def test_the_end_of_sequence_id_ends_it(engine: Any, checkpoint: Any) -> None:
    driven = engine(checkpoint())
    eos = driven.core.info.eos_token_ids[0]
    tokens = generate(driven, max_tokens=5, logit_bias={eos: 100.0})
    assert tokens == [eos] and driven.reasons["r"] == "stop"
    tokens = generate(driven, "i", max_tokens=5, logit_bias={eos: 100.0}, ignore_eos=True)
    assert tokens == [eos] * 5 and driven.reasons["i"] == "length"


def test_sampling_does_not_depend_on_the_batch(engine: Any, checkpoint: Any) -> None:
    expected = generate(
        engine(checkpoint()), temperature=1.0, seed=3, max_tokens=20, ignore_eos=True
    )
    crowd = engine(checkpoint(), page_size=4, num_pages=60, chunked_prefill_size=3)
    crowd.add("r", PROMPT, temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    for i in range(6):
        crowd.add(f"x{i}", PROMPT[i:], temperature=1.3, top_k=5, max_tokens=30, ignore_eos=True)
    crowd.run()
    assert crowd.tokens["r"] == expected
    other_seed = generate(
        engine(checkpoint()), temperature=1.0, seed=4, max_tokens=20, ignore_eos=True
    )
    assert other_seed != expected


def test_priority_is_served_first(engine: Any, checkpoint: Any) -> None:
    driven = engine(checkpoint(), max_num_seqs=1, scheduling_policy="priority")
    order: list[str] = []
    for name, priority in (("low", 5), ("high", -1), ("mid", 2)):
        driven.add(name, PROMPT, max_tokens=2, priority=priority, ignore_eos=True)
    while driven.core.has_work:
        driven.step()
        order += [n for n in driven.reasons if n not in order]
    assert order == ["high", "mid", "low"]


TENANTS = """
from treadle.api import impl

TREADLE = {"scheduling_policies": ["tenants"]}
RANKS = {"gold": 0, "silver": 1}


class Tenants:
    def sort_key(self, request):
        within = request.extra_args.get("tenants", {}).get("rank", 9)
        return (RANKS.get(request.client, 2), within)

    def select_victim(self, running):
        return 0


@impl
def treadle_scheduling_policy(name):
    return Tenants()
"""


def test_a_policy_sees_whose_a_request_is_and_what_it_says(
    engine: Any, checkpoint: Any, tmp_path: Path
) -> None:
    """Arguments for the policy alone do not make a step wait for the sampled tokens."""
    file = tmp_path / "tenants.py"
    file.write_text(TENANTS)
    options = {"max_num_seqs": 1, "scheduling_policy": "tenants", "plugin_file": [str(file)]}
    driven = engine(checkpoint(), **options)
    same = {"max_tokens": 2, "ignore_eos": True}
    driven.add("nobody", PROMPT, **same)
    driven.add("silver", PROMPT, client="silver", extra_args={"tenants": {"rank": 2}}, **same)
    driven.add("silver-1", PROMPT, client="silver", extra_args={"tenants": {"rank": 1}}, **same)
    driven.add("gold", PROMPT, client="gold", **same)
    assert not any(s.defer_sampling for s in driven.core.scheduler.sequences.values())
    order: list[str] = []
    while driven.core.has_work:
        driven.step()
        order += [n for n in driven.reasons if n not in order]
    assert order == ["gold", "silver-1", "silver", "nobody"]
    with pytest.raises(RequestError, match="'fcfs', which is neither a logits processor"):
        driven.add("other", PROMPT, extra_args={"fcfs": {}})


def test_salts_isolate(engine: Any, checkpoint: Any) -> None:
    driven = engine(checkpoint())
    long = PROMPT * 5
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        generate(driven, name, long, max_tokens=1, cache_salt=salt)
    assert driven.cached == {"c": 32}


def test_a_sequence_without_a_possible_token_fails_alone(engine: Any, checkpoint: Any) -> None:
    driven = engine(checkpoint())
    weight = driven.core._executor._loaded_runner.model.get_parameter("model.embed_tokens.weight")
    with torch.no_grad():
        weight[77] = float("nan")
    driven.add("bad", [1, 77, 2], max_tokens=5, ignore_eos=True)
    driven.add("good", PROMPT, max_tokens=5, ignore_eos=True)
    driven.run()
    assert driven.reasons == {"bad": "error", "good": "length"}
    assert "NaN" in str(driven.errors["bad"])


def test_a_failed_step_ends_its_sequences_and_no_others(engine: Any, checkpoint: Any) -> None:
    driven = engine(checkpoint())
    decoder = driven.core._executor._loaded_runner.model.model

    def fails(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("boom")

    decoder.forward = fails
    driven.add("bad", PROMPT, max_tokens=5)
    driven.run()
    del decoder.forward
    assert driven.reasons == {"bad": "error"} and "boom" in str(driven.errors["bad"])
    assert len(generate(driven, "good", max_tokens=5, ignore_eos=True)) == 5


def test_the_context_ends_a_sequence(engine: Any, checkpoint: Any) -> None:
    driven = engine(checkpoint(), max_model_len=20)
    assert len(generate(driven, max_tokens=100, ignore_eos=True)) == 12
    assert driven.reasons["r"] == "length"
    assert len(generate(driven, "one", list(range(19)), max_tokens=5)) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ([], {}, "prompt", "the prompt is empty"),
        ([1, -1], {}, "prompt", "token id -1; the model's ids are 0 to 319"),
        ([320], {}, "prompt", "token id 320"),
        ([2**70], {}, "prompt", "ids are 0 to 319"),
        ([True], {}, "prompt", "True, which is not a token id"),
        (["a"], {}, "prompt", "'a', which is not a token id"),
        (list(range(300)), {}, "prompt", "However, the prompt has 300 tokens"),
        ([1], {"stop_token_ids": [999]}, "stop_token_ids", "999"),
        ([1], {"logit_bias": {320: 1.0}}, "logit_bias", "320"),
        ([1], {"allowed_token_ids": [4, 5000]}, "allowed_token_ids", "5000"),
        ([1], {"ignore_eos": True, "max_tokens": None}, "ignore_eos", "explicit max_tokens"),
        ([1], {"cache_salt": ""}, "cache_salt", "0 characters"),
    ],
)
def test_bad_requests_are_refused(
    prompt: Any, params: dict[str, Any], param: str, message: str, engine: Any, checkpoint: Any
) -> None:
    driven = engine(checkpoint())
    with pytest.raises(RequestError) as exc_info:
        driven.add("bad", prompt, **params)
    assert exc_info.value.param == param and message in str(exc_info.value)
    assert isinstance(exc_info.value, ContextLengthError) == (len(prompt) == 300)
    assert not driven.core.has_work


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": float("nan")}, {"temperature": -1}, {"temperature": "hot"}, {"top_p": 0},
        {"top_p": 1.5}, {"top_k": -2}, {"top_k": 1.5}, {"min_p": 2}, {"n": 0}, {"n": 10**9},
        {"max_tokens": 0}, {"max_tokens": -5}, {"min_tokens": -1}, {"seed": 2**80}, {"seed": "x"},
        {"repetition_penalty": 0}, {"presence_penalty": 3}, {"frequency_penalty": float("inf")},
        {"logprobs": 21}, {"logprobs": -1}, {"prompt_logprobs": 99}, {"stop": [""]}, {"stop": 5},
        {"stop": ["x"] * 17}, {"stop": ["x" * 300]}, {"stop_token_ids": [-3]},
        {"allowed_token_ids": []}, {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: 1000.0}},
        {"bad_words": [""]}, {"truncate_prompt_tokens": 0}, {"cache_salt": "x" * 200},
        {"temperature": True}, {"priority": 2**40},
    ],
)  # fmt: skip
def test_bad_parameters_name_themselves(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as exc_info:
        SamplingParams(**params)
    assert exc_info.value.param == next(iter(params))


def test_a_full_queue_and_a_used_id(engine: Any, checkpoint: Any) -> None:
    driven = engine(checkpoint(), max_num_queued_reqs=2)
    driven.add("a", PROMPT)
    with pytest.raises(RequestError, match="'a' is in use"):
        driven.add("a", PROMPT)
    driven.add("b", PROMPT)
    with pytest.raises(
        QueueFullError, match="2 requests are waiting; max_num_queued_reqs allows 2"
    ):
        driven.add("c", PROMPT)
    driven.run()
    driven.add("c", PROMPT)
    driven.run()


def test_abort_at_any_moment(engine: Any, checkpoint: Any) -> None:
    for steps in range(6):
        driven = engine(checkpoint(), chunked_prefill_size=3)
        driven.add("a", PROMPT, max_tokens=50, ignore_eos=True)
        for _ in range(steps):
            driven.step()
        driven.core.abort_requests(["a", "unknown"])
        driven.run(2)
        assert not driven.core.has_work and driven.core.stats.finished == {"abort": 1}


def test_a_cache_that_is_too_small_is_named(engine: Any, checkpoint: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"max_model_len is 200 tokens, but the KV cache holds 48 \(3 pages"
    ):
        engine(checkpoint(), num_pages=4, max_model_len=200)
    assert engine(checkpoint(), num_pages=4).core.info.max_model_len == 48
