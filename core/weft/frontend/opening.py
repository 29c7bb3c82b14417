"""Opens what a frontend needs of a checkpoint: tokenizer, renderer and default parameters.

Runs in the API process too, so nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from weft.config import EngineConfig, PluginConfig
from weft.engine.plan import EngineFacts
from weft.errors import CheckpointError
from weft.frontend.defaults import default_params
from weft.frontend.processor import NO_TOKENIZER, Processor
from weft.frontend.settings import has_tokenizer
from weft.loading.download import fetch
from weft.loading.sources import parse_ref
from weft.sampling.params import SamplingParams

if TYPE_CHECKING:
    from weft.api.files import ChatRenderer, Tokenizer
    from weft.plugins import Host

__all__ = ("Opened", "open_checkpoint", "plugin_config")


@dataclass(frozen=True, slots=True)
class Opened:
    """The text side of a checkpoint. Without tokenizer files, ``tokenizer`` and ``renderer`` are
    ``None`` and only token ids can be used."""

    tokenizer: Tokenizer | None
    renderer: ChatRenderer | None
    defaults: SamplingParams
    output_limit: int | None
    priorities: bool = True

    def processor(self, facts: EngineFacts) -> Processor:
        return Processor(
            facts, self.tokenizer, self.renderer, self.defaults, self.output_limit, self.priorities
        )

    def need_tokenizer(self) -> Tokenizer:
        """Raises ``CheckpointError`` if there is none."""
        if self.tokenizer is None:
            raise CheckpointError(NO_TOKENIZER)
        return self.tokenizer


def plugin_config(config: EngineConfig, *, isolated: bool = False) -> PluginConfig:
    """The plugins' configuration, with what the engine's options say about the renderer.

    ``isolated`` keeps the templates of the built-in renderer in a process of their own.
    """
    own: dict[str, Any] = {}
    if config.model.chat_template is not None:
        own["chat_template"] = config.model.chat_template
    if isolated and config.model.renderer == "jinja":
        own["isolated"] = True
    if not own:
        return config.plugins
    key = f"renderers:{config.model.renderer}"
    options = dict(config.plugins.plugin_options)
    options[key] = own | options.get(key, {})
    return msgspec.structs.replace(config.plugins, plugin_options=options)


def open_checkpoint(config: EngineConfig, host: Host) -> Opened:
    """Read the text side. ``host`` was made with ``plugin_config(config)``.

    Raises ``CheckpointError`` (damaged files), ``ConfigError`` and the errors of plugins.
    """
    model = config.model
    ref = parse_ref(model.model, model.revision, model.download_dir)
    files = fetch(host, ref, weights=False)
    defaults, limit = default_params(model, files.root)
    priorities = config.scheduler.scheduling_policy != "fcfs"
    if model.tokenizer is not None and model.tokenizer != model.model:
        files = fetch(host, parse_ref(model.tokenizer, None, model.download_dir), weights=False)
    elif model.tokenizer_mode == "auto" and not has_tokenizer(files.root):
        return Opened(None, None, defaults, limit, priorities)
    tokenizer = host.tokenizer(model.tokenizer_mode, files)
    renderer = host.renderer(model.renderer, files, tokenizer)
    return Opened(tokenizer, renderer, defaults, limit, priorities)
