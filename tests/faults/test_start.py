"""A plugin that fails while an engine starts ends the start, and its error says who, where and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from engines import EXPERTS, calls, config, create_plugins, failure_pattern, name, start

from treadle.config import from_options
from treadle.errors import CheckpointError, PluginLoadError

fault = pytest.mark.fault

HOOKS = {
    "model_sources": "treadle_model_source",
    "load_formats": "treadle_load_format",
    "tokenizers": "treadle_tokenizer",
    "models": "treadle_model",
    "quantization": "treadle_quantization",
    "executors": "treadle_executor",
    "scheduling_policies": "treadle_scheduling_policy",
    "logits_processors": "treadle_logits_processor",
    "stat_loggers": "treadle_stat_logger",
}
KINDS = [
    pytest.param("model_sources", marks=fault("model_sources", "hook")),
    pytest.param("load_formats", marks=fault("load_formats", "hook")),
    pytest.param("tokenizers", marks=fault("tokenizers", "hook")),
    pytest.param("models", marks=fault("models", "hook")),
    pytest.param("quantization", marks=fault("quantization", "hook")),
    pytest.param("executors", marks=fault("executors", "hook")),
    pytest.param("scheduling_policies", marks=fault("scheduling_policies", "hook")),
    pytest.param("logits_processors", marks=fault("logits_processors", "hook")),
    pytest.param("stat_loggers", marks=fault("stat_loggers", "hook")),
]
FAILURES = [("RuntimeError", False), ("Panic", False), ("RuntimeError", True)]

# kind, method, options of the engine
METHODS = [
    pytest.param("model_sources", "resolve", {}, marks=fault("model_sources", "resolve")),
    pytest.param(
        "model_sources", "resolve_revision", {}, marks=fault("model_sources", "resolve_revision")
    ),
    pytest.param("load_formats", "tensors", {}, marks=fault("load_formats", "tensors")),
    pytest.param("tokenizers", "chat_template", {}, marks=fault("tokenizers", "chat_template")),
    pytest.param(
        "tokenizers", "special_token_ids", {}, marks=fault("tokenizers", "special_token_ids")
    ),
    pytest.param("tokenizers", "id_to_token", {}, marks=fault("tokenizers", "id_to_token")),
    pytest.param("models", "build", {}, marks=fault("models", "build")),
    pytest.param("quantization", "linear_method", {}, marks=fault("quantization", "linear_method")),
    pytest.param(
        "quantization", "experts_method", EXPERTS, marks=fault("quantization", "experts_method")
    ),
    pytest.param(
        "quantization", "kv_cache_dtype", {}, marks=fault("quantization", "kv_cache_dtype")
    ),
    pytest.param("quantization", "rename", {}, marks=fault("quantization", "rename")),
    pytest.param(
        "quantization", "create_weights", {}, marks=fault("quantization", "create_weights")
    ),
    pytest.param(
        "quantization",
        "process_weights_after_loading",
        {},
        marks=fault("quantization", "process_weights_after_loading"),
    ),
    pytest.param("attention_backends", "create", {}, marks=fault("attention_backends", "create")),
    pytest.param(
        "attention_backends",
        "kv_cache_shape",
        {},
        marks=fault("attention_backends", "kv_cache_shape"),
    ),
    pytest.param("kernel_ops", "load", {}, marks=fault("kernel_ops", "load")),
    pytest.param("executors", "start", {}, marks=fault("executors", "start")),
]


@pytest.mark.parametrize(("failure", "strict"), FAILURES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_raises_ends_the_start(kind: str, failure: str, strict: bool) -> None:
    engine_config = config(kind, "hook", failure, plugin_strict=strict)
    plugins = create_plugins(engine_config)
    with pytest.raises(
        PluginLoadError, match=failure_pattern(kind, HOOKS[kind], f"{failure}: odd")
    ) as exc_info:
        start(plugins, engine_config)
    assert type(exc_info.value.__cause__).__name__ == failure, "the root cause is chained"
    assert calls(plugins, kind, HOOKS[kind])["error"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_returns_nothing_ends_the_start(kind: str) -> None:
    engine_config = config(kind, "hook", "None")
    words = rf"{name(kind)} is declared by odd.py \w+, but its {HOOKS[kind]} returned None"
    with pytest.raises(PluginLoadError, match=words):
        start(create_plugins(engine_config), engine_config)


@pytest.mark.parametrize(
    "kind",
    ["model_sources", "load_formats", "tokenizers", "models", "quantization", "executors"],
)
def test_a_hook_that_returns_something_else_is_named(kind: str) -> None:
    engine_config = config(kind, "hook", "text")
    with pytest.raises(PluginLoadError, match=rf"{name(kind)} from odd\.py .*'(odd|str)'"):
        start(create_plugins(engine_config), engine_config)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_words_for_the_user_passes(kind: str) -> None:
    engine_config = config(kind, "hook", "CheckpointError")
    with pytest.raises(CheckpointError, match=r"^odd$"):
        start(create_plugins(engine_config), engine_config)


@pytest.mark.parametrize(("kind", "method"), [("models", "hook"), ("models", "build")])
def test_what_is_meant_for_the_process_passes(kind: str, method: str) -> None:
    engine_config = config(kind, method, "KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        start(create_plugins(engine_config), engine_config)


@pytest.mark.parametrize("kind", KINDS)
def test_sys_exit_in_a_hook_is_a_failure_of_the_plugin(kind: str) -> None:
    engine_config = config(kind, "hook", "SystemExit")
    with pytest.raises(PluginLoadError, match=rf"{name(kind)} from odd\.py .*SystemExit: odd"):
        start(create_plugins(engine_config), engine_config)


@pytest.mark.parametrize(("failure", "strict"), FAILURES)
@pytest.mark.parametrize(("kind", "method", "options"), METHODS)
def test_a_method_that_raises_ends_the_start(
    kind: str, method: str, options: dict[str, Any], failure: str, strict: bool
) -> None:
    engine_config = config(kind, method, failure, plugin_strict=strict, **options)
    plugins = create_plugins(engine_config)
    with pytest.raises(
        PluginLoadError, match=f"^{failure_pattern(kind, method, f'{failure}: odd')}$"
    ) as exc_info:
        start(plugins, engine_config)
    assert type(exc_info.value.__cause__).__name__ == failure
    assert calls(plugins, kind, method)["error"] == 1


@pytest.mark.parametrize(("kind", "method", "options"), METHODS)
def test_a_method_may_say_it_in_words_for_the_user(
    kind: str, method: str, options: dict[str, Any]
) -> None:
    engine_config = config(kind, method, "CheckpointError", **options)
    with pytest.raises(CheckpointError, match=r"^odd$"):
        start(create_plugins(engine_config), engine_config)


@pytest.mark.parametrize("method", ["create_weights", "process_weights_after_loading"])
def test_a_method_for_experts_that_raises_ends_the_start(method: str) -> None:
    """The layers before the experts do not fail: their calls are the first ones."""
    first = 2  # linear layers of the one attention block
    engine_config = config("quantization", method, first_call=first + 1, **EXPERTS)
    with pytest.raises(PluginLoadError, match=failure_pattern("quantization", method)):
        start(create_plugins(engine_config), engine_config)


WRONG = [
    ("model_sources", "resolve", "None", "it returned None; ModelFiles was expected"),
    ("model_sources", "resolve_revision", "None", "it returned None; a str was expected"),
    ("load_formats", "tensors", "None", "cannot unpack"),
    ("load_formats", "tensors", "few", "not enough values"),
    ("tokenizers", "special_token_ids", "None", "'NoneType' object is not iterable"),
    ("tokenizers", "chat_template", "False", "it returned False; a str or None was expected"),
    ("models", "build", "None", "built a NoneType"),
    (
        "quantization",
        "linear_method",
        "text",
        "it returned 'odd'; LinearMethod, with create_weights",
    ),
    ("quantization", "kv_cache_dtype", "False", "it returned False; a str or None was expected"),
    ("quantization", "rename", "False", "it returned False; a str or None was expected"),
    (
        "attention_backends",
        "create",
        "None",
        "it returned None; AttentionBackend, with kv_cache_shape",
    ),
    (
        "attention_backends",
        "kv_cache_shape",
        "None",
        "it returned None; a tuple of sizes was expected",
    ),
    (
        "attention_backends",
        "kv_cache_shape",
        "negative",
        "it returned (-1,); a tuple of sizes was expected",
    ),
    ("kernel_ops", "load", "None", "it returned None; a function for rms_norm was expected"),
    ("executors", "start", "None", "it returned None; EngineInfo was expected"),
]


@pytest.mark.parametrize(("kind", "method", "failure", "words"), WRONG)
def test_a_method_that_returns_something_else_ends_the_start(
    kind: str, method: str, failure: str, words: str
) -> None:
    engine_config = config(kind, method, failure)
    with pytest.raises((PluginLoadError, CheckpointError), match=re.escape(words)) as exc_info:
        start(create_plugins(engine_config), engine_config)
    assert name(kind) in str(exc_info.value) or "OddForCausalLM" in str(exc_info.value)


FILLER = """
from treadle.api import impl

TREADLE = {"load_formats": ["filler"]}


class Filler:
    def tensors(self, wanted):
        return iter(())

    def fill(self, model):
        raise RuntimeError("odd")


@impl
def treadle_load_format(format):
    return Filler()
"""


@pytest.mark.fault("load_formats", "fill")
def test_a_loader_that_cannot_fill_the_parameters_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "filler.py").write_text(FILLER)
    engine_config = from_options(
        model="demo:treadle-demo",
        load_format="filler",
        plugin_file=[str(tmp_path / "filler.py")],
        cpu_threads=1,
        device="cpu",
    )
    words = r"^load_formats:filler from filler\.py \w+ failed in fill: RuntimeError: odd \(filler"
    with pytest.raises(PluginLoadError, match=words):
        start(create_plugins(engine_config), engine_config)


@pytest.mark.fault("load_formats", "file_of")
def test_a_loader_that_cannot_name_its_files_does_not_hide_what_is_wrong() -> None:
    """``where`` is asked for the words of another error: a checkpoint that does not fit."""
    engine_config = config("load_formats", "file_of", hf_overrides={"intermediate_size": 512})
    plugins = create_plugins(engine_config)
    words = f"a file whose name is not known .*{failure_pattern('load_formats', 'file_of')}.* does not fit"
    with pytest.raises(CheckpointError, match=words):
        start(plugins, engine_config)
    assert calls(plugins, "load_formats", "file_of") == {"error": 1}


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        pytest.param(
            "attention_backends",
            "treadle_attention_backend",
            marks=fault("attention_backends", "hook"),
        ),
        pytest.param("kernel_ops", "treadle_kernel_op", marks=fault("kernel_ops", "hook")),
    ],
)
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("RuntimeError", "RuntimeError: odd"),
        ("Panic", "Panic: odd"),
        ("text", "with 'odd'; an offer with"),
        ("high score", "score='high'"),
        ("no reasons", "reasons=None"),
    ],
)
def test_a_bid_that_fails_is_a_refusal(kind: str, hook: str, failure: str, message: str) -> None:
    """Others serve the model, unless the backend is pinned or the mode is strict."""
    engine_config = config(kind, "hook", failure, attention_backend=None)
    start(create_plugins(engine_config), engine_config)
    fatal = [config(kind, "hook", failure, attention_backend=None, plugin_strict=True)]
    if kind == "attention_backends":
        fatal.append(config(kind, "hook", failure))
    for engine_config in fatal:
        with pytest.raises(PluginLoadError, match=rf"{kind}:odd .*{hook}.*{message}"):
            start(create_plugins(engine_config), engine_config)


@pytest.mark.fault("attention_backends", "hook")
def test_an_offer_without_pages_is_a_refusal() -> None:
    engine_config = config("attention_backends", "hook", "no pages", attention_backend=None)
    start(create_plugins(engine_config), engine_config)
    engine_config = config("attention_backends", "hook", "no pages")
    with pytest.raises(PluginLoadError, match=r"attention_backends:odd .*page_sizes=\(\)"):
        start(create_plugins(engine_config), engine_config)


@pytest.mark.fault("models", "treadle_model_config")
@pytest.mark.parametrize(
    ("failure", "words"),
    [("RuntimeError", "RuntimeError: odd"), ("text", "with 'odd'; the fields")],
)
def test_a_configuration_that_is_misread_ends_the_start(failure: str, words: str) -> None:
    engine_config = config("models", "treadle_model_config", failure)
    plugins = create_plugins(engine_config)
    with pytest.raises(PluginLoadError, match=f"models:Odd.*treadle_model_config.*{words}"):
        start(plugins, engine_config)
    left_to_transformers = config("models", "treadle_model_config", "None")
    start(create_plugins(left_to_transformers), left_to_transformers)


@pytest.mark.fault("quantization", "treadle_match")
@pytest.mark.parametrize(
    ("failure", "words"), [("RuntimeError", "RuntimeError: odd"), ("text", "'odd'")]
)
def test_a_match_that_fails_matches_nothing(failure: str, words: str) -> None:
    """It is asked only where a checkpoint does not say how it is quantized."""
    unnamed = {"quantization_config": {"bits": 4}}
    options = {"hf_overrides": unnamed, "quantization": "auto"}
    engine_config = config("quantization", "treadle_match", failure, **options)
    plugins = create_plugins(engine_config)
    with pytest.raises(CheckpointError, match="no installed plugin recognizes it"):
        start(plugins, engine_config)
    if failure == "RuntimeError":
        assert calls(plugins, "quantization", "treadle_match") == {"error": 1}
    strict = config("quantization", "treadle_match", failure, plugin_strict=True, **options)
    with pytest.raises(PluginLoadError, match=f"quantization:odd .*treadle_match.*{words}"):
        start(create_plugins(strict), strict)
