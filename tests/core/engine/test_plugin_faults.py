"""Plugins that raise while the engine runs: who pays for it, and that the engine goes on."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from weft.errors import EngineError, RequestError
from weft.plugins.tally import MOST_FAILURES

PROMPT = [5, 9, 200, 17, 33, 4, 90, 12]

LOGGER = """
from weft.api import impl

WEFT = {"stat_loggers": ["bad", "good"]}
calls = {"bad": 0, "good": 0}


class Logger:
    def __init__(self, name):
        self.name = name

    def record(self, stats):
        calls[self.name] += 1
        if self.name == "bad":
            raise OSError("the disk is full")


@impl
def weft_stat_logger(name):
    return Logger(name)


@impl
def weft_report():
    return str(calls)
"""
PROCESSOR = """
from weft.api import impl

WEFT = {"logits_processors": ["odd"]}


class Odd:
    def check(self, arguments):
        if arguments == "odd":
            raise LookupError("what is odd?")

    def apply(self, logits, arguments, tokens):
        for row, given in enumerate(arguments):
            logits[row, 7] = 1000.0
            if len(tokens[row]) - 8 == given:
                raise ValueError(f"row with {given}")
        return logits


@impl
def weft_logits_processor(name):
    return Odd()
"""
POLICY = """
from weft.api import impl

WEFT = {"policies": ["odd"]}


class Odd:
    def order(self, request):
        if request.priority == 9:
            raise ZeroDivisionError("by nobody")
        if request.priority == 8:
            return ("high",)
        if request.priority == 7:
            return (1.0, 2.0, 3.0)
        return (request.arrival,)

    def victim(self, running):
        raise KeyError("victim")


@impl
def weft_policy(name):
    return Odd()
"""
ATTENTION = """
from weft.api import impl
from weft.attention import plugin
from weft.api.types import Offer

WEFT = {"attention": ["odd"]}


class Odd:
    def __init__(self, inner):
        self.inner = inner
        self.cache_shape = inner.cache_shape
        self.calls = {"plan": 0, "forward": 0}

    def count(self, method):
        self.calls[method] += 1
        if WHERE == method and self.calls[method] == WHEN:
            raise RuntimeError("bad kernel")

    def plan(self, *rest):
        self.count("plan")
        return self.inner.plan(*rest)

    def forward(self, q, *rest):
        self.count("forward")
        return self.inner.forward(q, *rest)


@impl
def weft_attention(request):
    offer = plugin.weft_attention(request=request, options={})
    return Offer("odd", 99, lambda: Odd(offer.create()), offer.page_sizes)
"""
EXTENSION = """
from weft.api import impl


@impl(wrapper=True)
def weft_policy(name):
    found = yield
    raise TypeError("the extension is wrong")
"""


@pytest.fixture
def plugin(tmp_path: Any) -> Any:
    def write(text: str, name: str = "odd") -> list[str]:
        (tmp_path / f"{name}.py").write_text(text)
        return [str(tmp_path / f"{name}.py")]

    return write


def calls(driven: Any, plugin: str, hook: str) -> dict[str, int]:
    """By outcome; a slow call is ok, because other tests may keep the machine busy."""
    found: Counter[str] = Counter()
    for p, h, outcome, n in driven.core.stats.plugin_calls:
        if (p, h) == (plugin, hook):
            found["ok" if outcome == "slow" else outcome] += n
    return dict(found)


def test_a_stat_logger_that_raises_is_left_out_after_some_steps(
    engine: Any, checkpoint: Any, plugin: Any
) -> None:
    driven = engine(checkpoint(), plugin_file=plugin(LOGGER), stat_loggers=["bad", "good"])
    driven.add("a", PROMPT, max_tokens=10, ignore_eos=True)
    driven.run()
    assert len(driven.tokens["a"]) == 10 and driven.reasons["a"] == "length"
    assert calls(driven, "stat_loggers:bad", "record") == {"error": MOST_FAILURES}
    assert calls(driven, "stat_loggers:good", "record") == {"ok": 10}
    states = driven.core.stats.plugin_states
    assert (states["stat_loggers:bad"], states["stat_loggers:good"]) == ("broken", "loaded")
    (entry,) = (e for e in driven.core.host.entries if e.key == "bad")
    assert "the disk is full" in entry.why


def test_in_strict_mode_it_ends_the_engine(engine: Any, checkpoint: Any, plugin: Any) -> None:
    options = {"plugin_file": plugin(LOGGER), "stat_loggers": ["bad"], "plugin_strict": True}
    driven = engine(checkpoint(), **options)
    driven.add("a", PROMPT, max_tokens=10)
    with pytest.raises(EngineError, match=r"stat_loggers:bad .*the disk is full.*plugin_strict"):
        driven.run()


def test_a_logits_processor_that_raises_costs_its_request_alone(
    engine: Any, checkpoint: Any, plugin: Any
) -> None:
    """Request b fails at its third token; a, which uses the processor too, and c do not notice."""
    options = {"plugin_file": plugin(PROCESSOR), "logits_processors": ["odd"]}
    driven = engine(checkpoint(), **options)
    settings = {"max_tokens": 6, "ignore_eos": True}
    driven.add("c", PROMPT, **settings)
    driven.run()
    expected = driven.tokens["c"]
    for name, extra in (("a", {"odd": 99}), ("b", {"odd": 2}), ("c", None)):
        driven.add(name, PROMPT, **settings, **({"extra": extra} if extra else {}))
    driven.run()
    assert driven.tokens == {"a": [7] * 6, "b": [7, 7], "c": expected}
    assert driven.reasons == {"a": "length", "b": "error", "c": "length"}
    said = r"logits_processors:odd from odd.py \w+ failed in apply: ValueError: row with 2"
    assert re.fullmatch(said, driven.errors["b"])

    assert calls(driven, "logits_processors:odd", "apply") == {"ok": 2 + 1 + 3, "error": 2}
    assert calls(driven, "logits_processors:odd", "check") == {"ok": 2}


def test_a_logits_processor_that_cannot_check_refuses_the_request(
    engine: Any, checkpoint: Any, plugin: Any
) -> None:
    options = {"plugin_file": plugin(PROCESSOR), "logits_processors": ["odd"]}
    driven = engine(checkpoint(), **options)
    with pytest.raises(RequestError, match=r"logits_processors:odd from .* failed in check: LookupError: .*what is odd"):
        driven.add("a", PROMPT, extra={"odd": "odd"})
    driven.add("b", PROMPT, max_tokens=3, extra={"odd": 99})
    driven.run()
    assert driven.tokens == {"b": [7] * 3}
    assert calls(driven, "logits_processors:odd", "check") == {"ok": 1, "error": 1}


def test_in_strict_mode_a_logits_processor_ends_the_engine(
    engine: Any, checkpoint: Any, plugin: Any
) -> None:
    options = {"plugin_file": plugin(PROCESSOR), "logits_processors": ["odd"]}
    driven = engine(checkpoint(), **options, plugin_strict=True)
    with pytest.raises(EngineError, match=r"failed in check: .*plugin_strict"):
        driven.add("a", PROMPT, extra={"odd": "odd"})
    driven.add("b", PROMPT, max_tokens=9, ignore_eos=True, extra={"odd": 2})
    with pytest.raises(
        EngineError, match=r"failed in apply: ValueError: row with 2 .*plugin_strict"
    ):
        driven.run()


@pytest.mark.parametrize(
    ("priority", "words"),
    [(9, "ZeroDivisionError: by nobody"), (8, "ValueError"), (7, "has not 1 numbers as before")],
)
def test_a_request_that_a_policy_cannot_order_fails_alone(
    engine: Any, checkpoint: Any, plugin: Any, priority: int, words: str
) -> None:
    driven = engine(checkpoint(), plugin_file=plugin(POLICY), scheduling_policy="odd")
    driven.add("a", PROMPT, max_tokens=4, ignore_eos=True)
    driven.add("b", PROMPT, max_tokens=4, ignore_eos=True, priority=priority)
    driven.run()
    assert driven.reasons == {"a": "length", "b": "error"}
    assert words in driven.errors["b"] and "policies:odd" in driven.errors["b"]
    driven.add("c", PROMPT, max_tokens=4, ignore_eos=True, priority=priority)
    driven.run()
    assert driven.reasons["c"] == "error", "the last one is told too, with nothing else to do"


def test_a_policy_without_a_victim_leaves_the_choice_to_us(
    engine: Any, checkpoint: Any, plugin: Any
) -> None:
    options = {"page_size": 4, "num_pages": 14, "max_num_seqs": 4}
    driven = engine(checkpoint(), plugin_file=plugin(POLICY), scheduling_policy="odd", **options)
    for name in "abcd":
        driven.add(name, PROMPT, max_tokens=24, ignore_eos=True)
    driven.run()
    assert set(driven.reasons.values()) == {"length"} and driven.core.stats.preemptions
    assert calls(driven, "policies:odd", "victim") == {"error": driven.core.stats.preemptions}


@pytest.mark.parametrize(("where", "when"), [("forward", 7), ("plan", 3)])
def test_a_step_that_attention_fails_in_fails_its_requests_and_no_others(
    engine: Any, checkpoint: Any, plugin: Any, where: str, when: int
) -> None:
    text = ATTENTION + f"\n\nWHERE, WHEN = {where!r}, {when}\n"
    driven = engine(checkpoint(), plugin_file=plugin(text), attention_backend="odd")
    driven.add("a", PROMPT, max_tokens=9, ignore_eos=True)
    driven.add("b", PROMPT, max_tokens=9, ignore_eos=True)
    driven.run()
    assert driven.reasons == {"a": "error", "b": "error"}
    assert "RuntimeError: bad kernel" in driven.errors["a"]
    driven.add("c", PROMPT, max_tokens=9, ignore_eos=True)
    driven.run()
    assert driven.reasons["c"] == "length" and len(driven.tokens["c"]) == 9


MODEL = """
from weft.api import impl


@impl(wrapper=True)
def weft_model(architecture):
    import dataclasses
    from importlib import import_module

    spec = yield
    built = []

    def build(*arguments):
        model = spec.build(*arguments)
        inner, calls = getattr(model, METHOD), []

        def odd(*rest):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("bad layer")
            return inner(*rest)

        setattr(model, METHOD, odd)
        return model

    return dataclasses.replace(spec, build=build)
"""


@pytest.mark.parametrize("method", ["forward", "logits"])
def test_a_step_that_the_model_fails_in_fails_its_requests_and_no_others(
    engine: Any, checkpoint: Any, plugin: Any, method: str
) -> None:
    files = plugin(MODEL + f"\n\nMETHOD = {method!r}\n")
    driven = engine(checkpoint(), plugin_file=files)
    for name, reason in (("a", "error"), ("b", "length")):
        driven.add(name, PROMPT, max_tokens=9, ignore_eos=True)
        driven.run()
        assert driven.reasons[name] == reason
    assert "RuntimeError: bad layer" in driven.errors["a"] and len(driven.tokens["b"]) == 9


def test_an_extension_that_raises_is_left_out(engine: Any, checkpoint: Any, plugin: Any) -> None:
    driven = engine(checkpoint(), plugin_file=plugin(EXTENSION))
    driven.add("a", PROMPT, max_tokens=4, ignore_eos=True)
    driven.run()
    assert driven.reasons == {"a": "length"}
    assert calls(driven, "extensions:odd", "weft_policy") == {"error": 1}
    for _ in range(MOST_FAILURES):
        assert driven.core.host.policy("fcfs") is not None
    assert calls(driven, "extensions:odd", "weft_policy") == {"error": MOST_FAILURES}
    assert driven.core.stats.plugin_states["extensions:odd"] == "broken"


def test_in_strict_mode_an_extension_that_raises_ends_the_start(
    engine: Any, checkpoint: Any, plugin: Any
) -> None:
    with pytest.raises(EngineError, match=r"extensions:odd .*the extension is wrong"):
        engine(checkpoint(), plugin_file=plugin(EXTENSION), plugin_strict=True)


def test_an_error_of_the_plugin_is_not_put_on_the_extension(
    engine: Any, checkpoint: Any, plugin: Any, tmp_path: Any
) -> None:
    from weft.config import PluginConfig
    from weft.errors import PluginLoadError
    from weft.plugins import Host

    files = plugin(EXTENSION.replace('raise TypeError("the extension is wrong")', "return found"))
    bad = 'from weft.api import impl\nWEFT = {"policies": ["bad"]}\n@impl\ndef weft_policy(name):\n    1 / 0\n'
    files += plugin(bad, "bad")
    host = Host(PluginConfig(plugin_file=files))
    with pytest.raises(PluginLoadError, match=r"policies:bad .*division by zero"):
        host.policy("bad")
    assert ("policies:bad", "weft_policy", "error", 1) in host.tally.rows()
