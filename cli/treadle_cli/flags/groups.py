"""The Structs that become flags, with their headings on the help page and sections of the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from treadle.api.sampling_params import BOUNDS, OPEN_BELOW, SamplingParams
from treadle.config import PluginConfig, config_sections
from treadle_cli.bench.config import BenchConfig
from treadle_cli.bench.serve.config import ServeBenchConfig

__all__ = (
    "BENCH",
    "BENCH_SERVE",
    "COMPLETION",
    "ENGINE",
    "PLUGINS",
    "SAMPLING",
    "SECTIONS",
    "Field",
    "Group",
    "server_group",
)


@dataclass(frozen=True, slots=True)
class Field:
    """One option of a Struct. ``annotation`` keeps its ``Meta``."""

    name: str
    annotation: Any
    default: Any
    description: str


@dataclass(frozen=True, slots=True)
class Group:
    """The options of one Struct, all but ``skip``; ``help`` describes those without a ``Meta``."""

    section: str
    panel: str
    struct: type[msgspec.Struct]
    skip: frozenset[str] = frozenset()
    help: Mapping[str, str] = field(default_factory=dict)

    def fields(self) -> Iterator[Field]:
        hints = get_type_hints(self.struct, include_extras=True)
        for struct_field in msgspec.structs.fields(self.struct):
            if struct_field.name not in self.skip:
                annotation = hints[struct_field.name]
                text = description(annotation) or self.help.get(struct_field.name, "")
                yield Field(struct_field.name, annotation, _default(struct_field), text)

    def names(self) -> frozenset[str]:
        return frozenset(f.name for f in self.fields())


def description(annotation: Any) -> str:
    """The text of the outermost ``Meta``."""
    if get_origin(annotation) is Annotated:
        for note in get_args(annotation)[1:]:
            if isinstance(note, msgspec.Meta) and note.description:
                return note.description
    return ""


def _default(struct_field: Any) -> Any:
    if struct_field.default_factory is not msgspec.NODEFAULT:
        return struct_field.default_factory()
    return None if struct_field.default is msgspec.NODEFAULT else struct_field.default


PANELS = {
    "model": "Model",
    "cache": "KV cache",
    "scheduler": "Scheduler",
    "device": "Device",
    "plugins": "Plugins",
}
ENGINE = tuple(
    Group(name, PANELS.get(name, name.title()), struct) for name, struct in config_sections()
)

PLUGINS = Group(
    "plugins",
    PANELS["plugins"],
    PluginConfig,
    skip=frozenset(PluginConfig.__struct_fields__)
    - {"pin_plugin", "disable_plugin", "plugin_file"},
)
"""The options that select plugins, without those that only an engine uses."""


def _bounded(texts: Mapping[str, str]) -> dict[str, str]:
    """Add the bounds that the sampler checks, from its own table."""
    result: dict[str, str] = {}
    for name, text in texts.items():
        if name in BOUNDS and abs(BOUNDS[name][1]) < 2**31 - 1:
            low, high = BOUNDS[name]
            text = f"{text} {'(' if name in OPEN_BELOW else '['}{low:g} … {high:g}]"
        result[name] = text
    return result


SAMPLING = Group(
    "sampling",
    "Sampling",
    SamplingParams,
    # ``seed`` is an option of the engine already; the others have no effect in a terminal.
    skip=frozenset({"seed", "output_kind", "detokenize"}),
    help=_bounded(
        {
            "n": "Outputs of each prompt.",
            "max_tokens": "Most tokens to generate.",
            "min_tokens": "No end before so many tokens.",
            "temperature": "0 is greedy; higher is more random.",
            "top_p": "Sample from the likeliest tokens with this total probability.",
            "top_k": "Sample from so many of the likeliest tokens; -1 is all.",
            "min_p": "Drop tokens less likely than this share of the likeliest.",
            "repetition_penalty": "Above 1 discourages tokens of prompt and output.",
            "presence_penalty": "Above 0 discourages tokens that occur in the output.",
            "frequency_penalty": "Above 0 discourages them by how often they do.",
            "stop": "End at this text. Repeatable.",
            "stop_token_ids": "End at this token id. Repeatable.",
            "include_stop_str_in_output": "Keep the stop text.",
            "ignore_eos": "Do not end at the end-of-sequence token.",
            "logit_bias": 'JSON: {"token id": bias}, each -100 … 100.',
            "allowed_token_ids": "Sample only these ids. Repeatable.",
            "bad_words": "Never generate this text. Repeatable.",
            "logprobs": "Log probabilities of so many alternatives (seen with --json).",
            "prompt_logprobs": "The same for the prompt (seen with --json).",
            "skip_special_tokens": "Leave special tokens out of the text.",
            "spaces_between_special_tokens": "Put spaces between special tokens.",
            "truncate_prompt_tokens": "Keep only so many of the prompt's last tokens.",
            "priority": "Lower is served first (--scheduling-policy priority).",
            "cache_salt": "Share the prefix cache only with requests of the same salt.",
            "structured_outputs": 'JSON: {"regex": "…"}, or json, json_object, choice, grammar.',
            "extra_args": "JSON: arguments of logits-processor plugins, by name.",
            "thinking_token_budget": "Tokens after which the reasoning is ended.",
        }
    ),
)

COMPLETION = replace(SAMPLING, skip=SAMPLING.skip | {"thinking_token_budget"})
"""Without what only a chat has."""

BENCH = Group("bench", "Benchmark", BenchConfig)
BENCH_SERVE = Group("bench_serve", "Benchmark", ServeBenchConfig)

SECTIONS = frozenset({*PANELS, "sampling", "server", "bench", "bench_serve"})
"""Section names of a configuration file; a command ignores those that it has no flags for."""


def server_group() -> Group:
    """The options of the server. Raises ``ModuleNotFoundError`` if it is not installed."""
    from treadle_server.config import ServerConfig

    return Group("server", "Server", ServerConfig)
