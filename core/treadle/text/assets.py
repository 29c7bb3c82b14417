"""Opens what a frontend needs of a checkpoint: tokenizer, renderer and default parameters.

Runs in the API process too, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from treadle.api.checkpoints import template_text
from treadle.api.kinds import RENDERERS, TOKENIZERS
from treadle.api.matching import ModelTraits
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig, PluginConfig
from treadle.errors import CheckpointError, PluginNotFoundError
from treadle.known_plugins import install_hint, known_distributions
from treadle.loading.formats import fetch
from treadle.loading.matching import AUTO, Decision, decide
from treadle.loading.sources import parse_ref
from treadle.text.chat import ChatProcessor
from treadle.text.defaults import default_params
from treadle.text.input_processor import NO_TOKENIZER, InputProcessor
from treadle.text.parser_plugins import ParserPlugins, PluginWatchdogs

if TYPE_CHECKING:
    from treadle.api.files import ChatRenderer, Tokenizer
    from treadle.plugins import PluginManager

__all__ = ("FrontendAssets", "choose_renderer", "open_checkpoint", "plugin_config")

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


@dataclass(frozen=True, slots=True)
class FrontendAssets:
    """The text side of a checkpoint. Without tokenizer files, ``tokenizer`` and ``renderer`` are
    ``None`` and only token ids can be used."""

    tokenizer: Tokenizer | None
    renderer: ChatRenderer | None
    defaults: SamplingParams
    output_limit: int | None
    priorities: bool = True
    traits: ModelTraits = field(default_factory=ModelTraits)
    """What plugins may know of the model to say whether they are made for it."""
    guarded_tokenizer: Tokenizer | None = None
    """``tokenizer`` for the texts of requests: what it raises says whose it is."""

    def processor(self, info: EngineInfo) -> InputProcessor:
        return InputProcessor(
            info,
            self.guarded_tokenizer,
            self.renderer,
            self.defaults,
            self.output_limit,
            self.priorities,
        )

    def chats(
        self,
        config: EngineConfig,
        host: PluginManager,
        processor: InputProcessor,
        watchdogs: PluginWatchdogs | None = None,
    ) -> ChatProcessor:
        """Raises ``PluginConflictError`` if several parsers match the model equally well."""
        plugins = ParserPlugins.choose(
            host, self.tokenizer, self.traits, config.model, watchdogs=watchdogs
        )
        return ChatProcessor(processor, plugins)

    def need_tokenizer(self) -> Tokenizer:
        """Raises ``CheckpointError`` if there is none."""
        if self.tokenizer is None:
            raise CheckpointError(NO_TOKENIZER)
        return self.tokenizer


def plugin_config(config: EngineConfig, *, isolated: bool = False) -> PluginConfig:
    """The plugins' configuration, with what the engine's options say about the renderer.

    ``isolated`` keeps chat templates in a process of their own.
    """
    own: dict[str, Any] = {}
    if config.model.chat_template is not None:
        own["chat_template"] = config.model.chat_template
    name = _renderer_option(config)
    if isolated and name in (AUTO, JINJA):
        own["isolated"] = True
    if not own:
        return config.plugins
    key = f"renderers:{JINJA if name == AUTO else name}"
    options = dict(config.plugins.plugin_options)
    options[key] = own | options.get(key, {})
    return msgspec.structs.replace(config.plugins, plugin_options=options)


def open_checkpoint(config: EngineConfig, plugins: PluginManager) -> FrontendAssets:
    """Read the text side. ``plugins`` was made with ``plugin_config(config)``.

    Raises ``CheckpointError`` (damaged files), ``ConfigError`` and the errors of plugins.
    """
    model = config.model
    ref = parse_ref(model.model, model.revision, model.download_dir)
    files = fetch(plugins, ref, weights=False)
    traits = ModelTraits(config={**files.config, **model.hf_overrides})
    defaults, limit = default_params(model, files.root)
    priorities = config.scheduler.scheduling_policy != "fcfs"
    if model.tokenizer is not None and model.tokenizer != model.model:
        files = fetch(plugins, parse_ref(model.tokenizer, None, model.download_dir), weights=False)
    elif model.tokenizer_mode == "auto" and not any(
        any(files.root.glob(name)) for name in TOKENIZER_FILES
    ):
        return FrontendAssets(None, None, defaults, limit, priorities, traits)
    tokenizer = plugins.create(TOKENIZERS, model.tokenizer_mode, files=files)
    watched = plugins.guarded(TOKENIZERS, model.tokenizer_mode, tokenizer)
    traits = _with_text(traits, tokenizer, watched, template_text(model.chat_template))
    chosen = choose_renderer(config, plugins, traits)
    if chosen.key is None:
        known = ", ".join(plugins.keys("renderers"))
        what = f"name one with --renderer (known: {known})"
        if not known:
            what = install_hint(*known_distributions("renderers"))
        raise PluginNotFoundError(f"a chat renderer is needed: {chosen.reason}; {what}")
    renderer = plugins.create_guarded(RENDERERS, chosen.key, files=files, tokenizer=tokenizer)
    return FrontendAssets(tokenizer, renderer, defaults, limit, priorities, traits, watched)


def choose_renderer(config: EngineConfig, plugins: PluginManager, traits: ModelTraits) -> Decision:
    """Raises ``PluginConflictError`` if several are made for the model."""
    name = _renderer_option(config)
    if name != config.model.renderer:
        return Decision(name, "--chat-template is a template for it")
    return decide(plugins, RENDERERS, traits, name)


def _renderer_option(config: EngineConfig) -> str:
    """A template of the user's own is for the renderer that reads templates."""
    given = config.model.chat_template is not None
    return JINJA if given and config.model.renderer == AUTO else config.model.renderer


def _with_text(
    traits: ModelTraits, tokenizer: Tokenizer, watched: Tokenizer, override: str | None
) -> ModelTraits:
    """``traits`` with what is known of the tokenizer; ``override`` replaces all templates."""
    templates: Mapping[str, str] = getattr(tokenizer, "chat_templates", {})
    if override is not None:
        templates = {"default": override}
    elif not templates and (template := watched.chat_template) is not None:
        templates = {"default": template}
    added = getattr(tokenizer, "added_tokens", ())
    special = (watched.id_to_token(i) for i in watched.special_token_ids)
    return replace(traits, templates=dict(templates), tokens=frozenset((*added, *special)))
