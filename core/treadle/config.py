"""The options of the engine.

``LLM(**options)``, the flags of ``treadle serve``, the TOML file and the documentation are
generated from the Structs below. ``from_options`` checks the limits, which are in
``msgspec.Meta``. Only this module reads ``TREADLE_*`` environment variables.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from treadle.errors import ConfigError
from treadle.option_names import answers_to, describe_variables, resolve

log = logging.getLogger(__name__)

__all__ = (
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "ModelConfig",
    "PluginConfig",
    "SchedulerConfig",
    "config_sections",
    "debug_enabled",
    "environment",
    "from_options",
    "listed",
    "report_foreign_variables",
    "set_library_environment",
)

Positive = Annotated[int, Meta(ge=1)]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoint to run and how to read it."""

    model: Annotated[
        str, Meta(description="A folder, a Hugging Face name (org/name), or scheme:path.")
    ] = "demo:treadle-demo"
    revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of a hub checkpoint.")
    ] = None
    download_dir: Annotated[
        str | None, Meta(description="Folder for hub checkpoints (default: the hub's cache).")
    ] = None
    tokenizer: Annotated[
        str | None, Meta(description="Checkpoint of the tokenizer (default: the model's).")
    ] = None
    tokenizer_revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of the tokenizer, if it has its own.")
    ] = None
    tokenizer_mode: Annotated[str, Meta(description="Tokenizer plugin.")] = "auto"
    renderer: Annotated[
        str, Meta(description="Chat renderer plugin; auto: the one that matches the model.")
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="Jinja file or text that replaces the model's chat template.")
    ] = None
    tool_call_parser: Annotated[
        str | None,
        Meta(
            description="Tool-call parser plugin; auto takes the one made for the model, or none."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str | None,
        Meta(description="Parser plugin that separates reasoning from the answer; auto, or none."),
    ] = "auto"
    served_model_name: Annotated[
        list[str], Meta(description="Names that requests may use (default: the model).")
    ] = msgspec.field(default_factory=list)
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Type of weights and activations; auto: the checkpoint's."),
    ] = "auto"
    max_model_len: Annotated[
        Positive | None,
        Meta(description="Maximum length of prompt plus output, in tokens (default: the model's)."),
    ] = None
    load_format: Annotated[
        str, Meta(description="auto, safetensors, pt, dummy (random weights), or a plugin's.")
    ] = "auto"
    quantization: Annotated[
        str, Meta(description="Quantization method; auto: the checkpoint's.")
    ] = "auto"
    hf_overrides: Annotated[
        dict[str, Any], Meta(description="JSON merged into the checkpoint's config.json.")
    ] = msgspec.field(default_factory=dict)
    generation_config: Annotated[
        str,
        Meta(
            description="auto: the checkpoint's generation_config.json; treadle: none; or a folder."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any], Meta(description="JSON merged into the default sampling parameters.")
    ] = msgspec.field(default_factory=dict)
    seed: Annotated[
        int, Meta(description="Seed of requests without a seed, and of dummy weights.")
    ] = 0


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache."""

    page_size: Annotated[
        Positive | None,
        Meta(description="Tokens per page (default: the attention backend's choice)."),
    ] = None
    num_pages: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(
            description="Pages of the KV cache (default: as many as gpu_memory_utilization allows)."
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1, description="Fraction of the GPU's memory that treadle may use (CUDA)."),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        Meta(
            description="Size of the KV cache in bytes (default: 1 GiB on a CPU; on CUDA, what "
            "gpu_memory_utilization leaves)."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"],
        Meta(description="Type of cached keys and values; auto: the model's."),
    ] = "auto"
    calculate_kv_scales: Annotated[
        bool,
        Meta(description="Compute the scales of an fp8 cache at start instead of loading them."),
    ] = False
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse the KV cache pages of prompts with the same prefix.")
    ] = True


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests are batched."""

    max_num_seqs: Annotated[Positive, Meta(description="Maximum sequences in a step.")] = 256
    max_num_batched_tokens: Annotated[
        Positive, Meta(description="Token budget of a step: decodes first, then prefill chunks.")
    ] = 8192
    chunked_prefill_size: Annotated[
        Positive | None, Meta(description="Maximum prompt tokens of one request in a step.")
    ] = None
    max_step_ms: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="Time that a step may take while others generate, in milliseconds: prompts are cut to "
            "fit; 0 sets no bound (default: 250 on a CPU, 40 on CUDA; LLM: 0)."
        ),
    ] = None
    scheduling_policy: Annotated[str, Meta(description="fcfs, priority, or a plugin's.")] = "fcfs"
    max_num_queued_reqs: Annotated[
        Positive, Meta(description="Maximum waiting requests; more are rejected (HTTP 429).")
    ] = 1024
    max_num_queued_grammars: Annotated[
        Positive,
        Meta(
            description="Maximum grammars that wait to be compiled, half of them of one client; more are "
            "rejected (HTTP 429)."
        ),
    ] = 64


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how the model runs."""

    device: Annotated[
        str, Meta(pattern=r"^(auto|(cpu|cuda)(:\d+)?)$", description="auto, cpu, cuda or cuda:N.")
    ] = "auto"
    attention_backend: Annotated[
        str | None, Meta(description="Attention backend (default: the offer with the best score).")
    ] = None
    distributed_executor_backend: Annotated[
        str, Meta(description="Executor plugin; auto: uni for one rank, else mp or another.")
    ] = "auto"
    tensor_parallel_size: Annotated[Positive, Meta(description="Tensor-parallel ranks.")] = 1
    enforce_eager: Annotated[bool, Meta(description="Do not capture CUDA graphs.")] = False
    cpu_threads: Annotated[
        Positive | None, Meta(description="CPU threads per worker (default: torch's choice).")
    ] = None
    startup_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that one stage of a start may take, or the time between two tensors of a "
            "checkpoint; then the start fails.",
        ),
    ] = 600.0


class PluginConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which plugins are used, and their options."""

    pin_plugin: Annotated[
        list[str], Meta(description="Pin the owner of a key: kind:key=distribution. Repeatable.")
    ] = msgspec.field(default_factory=list)
    disable_plugin: Annotated[
        list[str], Meta(description="Disable a distribution or a kind:key. Repeatable.")
    ] = msgspec.field(default_factory=list)
    isolate: Annotated[
        list[str],
        Meta(
            description="Run a parser, renderer, grammar backend or server plugin in its own process. Repeatable."
        ),
    ] = msgspec.field(default_factory=list)
    plugin_file: Annotated[
        list[str], Meta(description="Load one local Python file as a plugin. Repeatable.")
    ] = msgspec.field(default_factory=list)
    plugin_strict: Annotated[bool, Meta(description="Stop if any plugin fails.")] = False
    plugin_lock_file: Annotated[
        str | None,
        Meta(
            description="File of `treadle plugin lock`; the engine starts only if plugins match it."
        ),
    ] = None
    plugin_options: Annotated[
        dict[str, dict[str, Any]], Meta(description='JSON: {"kind:key": {"option": value}}.')
    ] = msgspec.field(default_factory=dict)
    plugin_time_budget: Annotated[
        dict[str, Annotated[float, Meta(gt=0)]],
        Meta(description='JSON: {"kind": seconds} after which a plugin call counts as slow.'),
    ] = msgspec.field(default_factory=dict)
    structured_output_backends: Annotated[
        list[str],
        Meta(description="Structured output backends to try, in order (default: all). Repeatable."),
    ] = msgspec.field(default_factory=list)
    logits_processors: Annotated[
        list[str], Meta(description="Logits processor plugins, in order. Repeatable.")
    ] = msgspec.field(default_factory=list)
    stat_loggers: Annotated[list[str], Meta(description="Stat logger plugins. Repeatable.")] = (
        msgspec.field(default_factory=list)
    )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of an engine. Build it with ``from_options``, which checks every value."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    cache: CacheConfig = msgspec.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    device: DeviceConfig = msgspec.field(default_factory=DeviceConfig)
    plugins: PluginConfig = msgspec.field(default_factory=PluginConfig)


def config_sections(
    config: type[msgspec.Struct] = EngineConfig,
) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Yield ``(field name, Struct type)`` for each section of a config."""
    yield from get_type_hints(config).items()


def from_options(options: Mapping[str, Any] | None = None, /, **overrides: Any) -> EngineConfig:
    """Build a config from flat options: ``from_options(model="…", max_num_seqs=8)``.

    A value of ``None`` selects the default. Raises ``ConfigError`` if an option is unknown or
    its value is outside its limits.
    """
    given = {**(options or {}), **overrides}
    values = resolve({name: value for name, value in given.items() if value is not None})
    sections: dict[str, dict[str, Any]] = {}
    for section, kind in config_sections():
        sections[section] = {f: values.pop(f) for f in kind.__struct_fields__ if f in values}
    for name in [n for n in values if (row := answers_to().get(n)) and row.server]:
        log.warning("option %s has no effect: it is an option of the server", name)
        del values[name]
    if values:
        raise ConfigError(_unknown(next(iter(values))))
    try:
        return msgspec.convert(sections, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_located(error, sections)) from error


def _unknown(name: str) -> str:
    import difflib

    names = [f for _, kind in config_sections() for f in kind.__struct_fields__]
    matches = difflib.get_close_matches(name, names, n=1)
    hint = (
        f"did you mean {matches[0]!r}?" if matches else f"known options: {', '.join(sorted(names))}"
    )
    return f"treadle has no option {name!r}; {hint}"


def _located(error: msgspec.ValidationError, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return msgspec's message (``Expected `int` - at `$.cache.page_size```) with the value."""
    message, _, path = str(error).partition(" - at `$.")
    names = path.rstrip("`").split(".")
    if len(names) < 2:
        return str(error)
    option = names[1].partition("[")[0]
    return f"option {option} is {sections[names[0]].get(option)!r}: {message}"


def environment() -> dict[str, Any]:
    """Return the plugin settings of the environment.

    ``TREADLE_DISABLED_PLUGINS`` and ``TREADLE_PLUGINS`` are comma-separated distributions or ``kind:key``
    ids. ``TREADLE_PLUGIN_AUTOLOAD=0`` ignores third-party plugins. ``TREADLE_PLUGIN_STRICT=1`` makes a plugin
    failure fatal.
    """
    return {
        "disable": listed("TREADLE_DISABLED_PLUGINS"),
        "allow": listed("TREADLE_PLUGINS"),
        "autoload": os.environ.get("TREADLE_PLUGIN_AUTOLOAD", "1") != "0",
        "strict": os.environ.get("TREADLE_PLUGIN_STRICT", "0") == "1",
    }


def listed(variable: str) -> list[str]:
    """Return the comma-separated names in a variable of the environment."""
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


SPIN_ENVIRONMENT = {
    # Threads that wait spin 0.1 to 0.2 ms, which bridges most of what lies between two products.
    "GOMP_SPINCOUNT": "5000",
    "KMP_BLOCKTIME": "200us",
}
LIBRARY_ENVIRONMENT = {
    # On a machine without idle cores, threads that spin make each other several times slower.
    "OMP_WAIT_POLICY": "passive",
    # oneDNN and torch's layer over it each keep 1024 compiled operations of 1 MB and more, one for each
    # shape of a product. New lengths make new shapes, so the caches would grow to gigabytes.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "16",
}


def report_foreign_variables() -> None:
    """Log which variables of vLLM are set, in one line: treadle reads none of them."""
    if line := describe_variables([name for name in os.environ if name.startswith("VLLM_")]):
        log.warning("%s", line)


def debug_enabled() -> bool:
    """Return whether the command line shows tracebacks of expected errors (``TREADLE_DEBUG=1``)."""
    return os.environ.get("TREADLE_DEBUG", "0") == "1"


def set_library_environment() -> None:
    """Set what libraries of torch read from the environment, unless it is set. Call this before
    importing torch; child processes inherit it."""
    values = dict(LIBRARY_ENVIRONMENT)
    with suppress(AttributeError, OSError):  # not every system tells its load
        if "OMP_WAIT_POLICY" not in os.environ and os.getloadavg()[0] < (os.cpu_count() or 1):
            values |= SPIN_ENVIRONMENT
    for name, value in values.items():
        os.environ.setdefault(name, value)
