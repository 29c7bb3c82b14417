"""Opens what a frontend needs of a checkpoint: tokenizer, renderer and default parameters.

Runs in the API process too, so nothing here imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treadle.api.checkpoints import read_json, template_text
from treadle.api.kinds import CORE_KINDS, RENDERERS, TOKENIZERS
from treadle.api.matching import ModelTraits
from treadle.api.sampling_params import THINKING_BUDGET, SamplingParams
from treadle.config import (
    EngineConfig,
    ModelConfig,
    PluginConfig,
    config_sections,
    from_options,
    report_foreign_variables,
)
from treadle.errors import (
    CheckpointError,
    ConfigError,
    PluginError,
    PluginNotFoundError,
    RequestError,
    TreadleError,
)
from treadle.known_plugins import install_hint, known_distributions
from treadle.loading.config import config_json
from treadle.loading.formats import fetch
from treadle.loading.matching import AUTO, NONE, Decision, decide
from treadle.loading.sources import parse_ref
from treadle.plugins import PluginManager
from treadle.processes.logs import SlowStepNotice, steps
from treadle.text.chat import ChatProcessor
from treadle.text.input_processor import NO_TOKENIZER, InputProcessor
from treadle.text.parser_plugins import PARSER_KINDS, ParserPlugins
from treadle.text.text_pool import TextPool

if TYPE_CHECKING:
    from treadle.api.files import ChatRenderer, Tokenizer

__all__ = (
    "FrontendAssets",
    "choose_renderer",
    "default_params",
    "open_checkpoint",
    "open_engine",
    "open_plugins",
    "plugin_config",
)

log = logging.getLogger("treadle.text")

JINJA = "jinja"
"""The renderer that reads chat templates."""

# Any of these lets a tokenizer be built.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
)

# What a generation_config.json says about sampling.
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class FrontendAssets:
    """The text side of a checkpoint. Without tokenizer files, ``tokenizer`` and ``renderer`` are
    ``None`` and only token ids can be used."""

    tokenizer: Tokenizer | None
    renderer: ChatRenderer | None
    defaults: SamplingParams = field(default_factory=SamplingParams)
    output_limit: int | None = None
    """The most output tokens of a request that names no ``max_tokens``, if the checkpoint says."""
    priorities: bool = True
    """Whether the scheduler heeds the priorities of requests."""
    traits: ModelTraits = field(default_factory=ModelTraits)
    """What plugins may know of the model to say whether they are made for it."""
    guarded_tokenizer: Tokenizer | None = None
    """``tokenizer`` for the texts of requests: what it raises says whose it is."""

    def chats(
        self,
        config: EngineConfig,
        host: PluginManager,
        processor: InputProcessor,
        texts: TextPool | None = None,
        **options: Any,
    ) -> ChatProcessor:
        """Return what prepares chats; beside an event loop, in threads if there are ``texts``.

        ``options`` are those of ``ParserPlugins``.
        """
        keys: dict[str, str | None] = {}
        for option, kind in PARSER_KINDS.items():
            decision = decide(host, kind, self.traits, getattr(config.model, option) or NONE)
            keys[option] = decision.key
            log.debug("%s: %s, %s", option, decision.key or NONE, decision.reason)
        plugins = ParserPlugins(host, self.tokenizer, keys, **options)
        return ChatProcessor(processor, plugins, texts)

    def start(self) -> None:
        """Start what the first chat would wait for, such as the process of chat templates."""
        getattr(self.renderer, "start", lambda: None)()

    def close(self) -> None:
        """Release what a renderer holds, such as processes. May be called twice."""
        getattr(self.renderer, "close", lambda: None)()

    def need_tokenizer(self) -> Tokenizer:
        """Raises ``CheckpointError`` if there is none."""
        if self.tokenizer is None:
            raise CheckpointError(NO_TOKENIZER)
        return self.tokenizer


def plugin_config(config: EngineConfig) -> PluginConfig:
    """The plugins' configuration, with what the engine's options say about the renderer."""
    if config.model.chat_template is None:
        return config.plugins
    name = _renderer_option(config)
    key = f"renderers:{JINJA if name == AUTO else name}"
    options = dict(config.plugins.plugin_options)
    options[key] = {"chat_template": config.model.chat_template} | options.get(key, {})
    return msgspec.structs.replace(config.plugins, plugin_options=options)


def open_engine(
    config: EngineConfig | None, model: str | None, options: Mapping[str, Any]
) -> tuple[EngineConfig, PluginManager]:
    """Return the configuration of an engine, and its plugins. Raises what ``open_plugins`` raises.

    The logits processor of thinking budgets is one of them if it is installed: unless a request
    names it, it costs nothing.
    """
    config = from_options(options, model=model) if config is None else config
    report_foreign_variables()
    plugins = open_plugins(config)
    names = config.plugins.logits_processors
    if THINKING_BUDGET in plugins.keys("logits_processors") and THINKING_BUDGET not in names:
        names = [*names, THINKING_BUDGET]
        changed = msgspec.structs.replace(config.plugins, logits_processors=names)
        config = msgspec.structs.replace(config, plugins=changed)
    return config, plugins


def open_plugins(config: EngineConfig) -> PluginManager:
    """Return the plugins of an engine, with all names in its options checked before a model is read.

    Raises ``PluginNotFoundError`` or ``PluginConflictError``, with the option.
    """
    if not steps.handlers:
        steps.addHandler(SlowStepNotice())
    plugins = PluginManager(plugin_config(config))
    sections = (getattr(config, name) for name, _ in config_sections())
    values = {k: v for section in sections for k, v in msgspec.structs.asdict(section).items()}
    for kind in CORE_KINDS:
        value = values.get(kind.option.removeprefix("--").replace("-", "_"))
        for key in value if isinstance(value, list) else [value]:
            if key not in (None, AUTO, NONE):
                try:
                    plugins.choose(kind.name, key)
                except TreadleError as error:
                    raise type(error)(f"{kind.option} is {key!r}: {error}") from error
    for name in plugins.config.plugin_options:
        with suppress(PluginError):  # what is not used may be broken
            plugins.options(*name.split(":", 1))
    return plugins


def open_checkpoint(config: EngineConfig, plugins: PluginManager) -> FrontendAssets:
    """Read the text side. ``plugins`` was made with ``open_plugins(config)``.

    Raises ``CheckpointError`` (damaged files), ``ConfigError`` and the errors of plugins.
    """
    model = config.model
    ref = parse_ref(model.model, model.revision, model.download_dir)
    files = fetch(plugins, ref, weights=False)
    traits = ModelTraits(config=config_json(files, model.hf_overrides))
    defaults, limit = default_params(model, files.root)
    priorities = config.scheduler.scheduling_policy != "fcfs"
    name = model.tokenizer or model.model
    if name != model.model or model.tokenizer_revision is not None:
        ref = parse_ref(name, model.tokenizer_revision, model.download_dir)
        files = fetch(plugins, ref, weights=False)
    elif model.tokenizer_mode == "auto" and not any(
        any(files.root.glob(name)) for name in TOKENIZER_FILES
    ):
        return FrontendAssets(None, None, defaults, limit, priorities, traits)
    tokenizer = plugins.create(TOKENIZERS, model.tokenizer_mode, files=files)
    guarded_tokenizer = plugins.guarded(TOKENIZERS, model.tokenizer_mode, tokenizer)
    traits = _with_text(traits, tokenizer, guarded_tokenizer, template_text(model.chat_template))
    decision = choose_renderer(config, plugins, traits)
    if decision.key is None:
        renderer_names = ", ".join(plugins.keys("renderers"))
        hint = f"name one with --renderer (known: {renderer_names})"
        if not renderer_names:
            hint = install_hint(*known_distributions("renderers"))
        raise PluginNotFoundError(f"a chat renderer is needed: {decision.reason}; {hint}")
    renderer = plugins.create_guarded(RENDERERS, decision.key, files=files, tokenizer=tokenizer)
    return FrontendAssets(
        tokenizer, renderer, defaults, limit, priorities, traits, guarded_tokenizer
    )


def default_params(config: ModelConfig, root: Path) -> tuple[SamplingParams, int | None]:
    """The default parameters, and the most output tokens that the checkpoint allows, if it says.

    ``root`` is the checkpoint's folder. Raises ``ConfigError`` for an unknown or impossible value.
    """
    values = {
        k: v for k, v in _generation_config(config, root).items() if k in SAMPLED and v is not None
    }
    values |= config.override_generation_config
    fields: dict[str, Any] = {}
    for name, value in values.items():
        field = "max_tokens" if name == "max_new_tokens" else name
        if field not in SamplingParams.__struct_fields__:
            raise ConfigError(
                f"override_generation_config holds {name!r}, which is no sampling parameter; known: "
                f"{', '.join(sorted({*SAMPLED, *SamplingParams.__struct_fields__}))}"
            )
        fields[field] = value
    try:
        return SamplingParams(**fields), values.get("max_new_tokens")
    except RequestError as error:
        raise ConfigError(
            f"the default sampling parameters (generation_config.json, override_generation_config) "
            f"cannot be used: {error}. Set generation_config=treadle to ignore the checkpoint's"
        ) from error


def _generation_config(config: ModelConfig, root: Path) -> dict[str, Any]:
    match config.generation_config:
        case "treadle" | "vllm":  # the name that users of vLLM type
            return {}
        case "auto":
            return read_json(root, "generation_config.json")
        case folder:
            root = Path(folder).expanduser()
            if not (root / "generation_config.json").is_file():
                raise ConfigError(
                    f"option generation_config is {folder!r}: {root / 'generation_config.json'} does "
                    "not exist; give auto, treadle or a folder that holds the file"
                )
            return read_json(root, "generation_config.json")


def choose_renderer(config: EngineConfig, plugins: PluginManager, traits: ModelTraits) -> Decision:
    """Raises ``PluginConflictError`` if several are made for the model."""
    name = _renderer_option(config)
    if name != config.model.renderer:
        return Decision(name, "--chat-template is a template for it")
    return decide(plugins, RENDERERS, traits, name)


def _renderer_option(config: EngineConfig) -> str:
    """A template of the user's own is for the renderer that reads templates."""
    has_template = config.model.chat_template is not None
    return JINJA if has_template and config.model.renderer == AUTO else config.model.renderer


def _with_text(
    traits: ModelTraits, tokenizer: Tokenizer, guarded_tokenizer: Tokenizer, override: str | None
) -> ModelTraits:
    """``traits`` with what is known of the tokenizer; ``override`` replaces all templates."""
    templates: Mapping[str, str] = getattr(tokenizer, "chat_templates", {})
    if override is not None:
        templates = {"default": override}
    elif not templates and (template := guarded_tokenizer.chat_template) is not None:
        templates = {"default": template}
    added_tokens = getattr(tokenizer, "added_tokens", ())
    special = (guarded_tokenizer.id_to_token(i) for i in guarded_tokenizer.special_token_ids)
    return replace(traits, templates=dict(templates), tokens=frozenset((*added_tokens, *special)))
