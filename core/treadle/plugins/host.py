"""The plugin host: one typed method for each hook of ``treadle.api.hookspecs``.

Every method resolves its key, imports the owner if needed and returns what the hook built. All
raise ``PluginNotFoundError`` (nobody provides the key), ``PluginConflictError`` (several do),
``PluginLoadError`` (the owner failed; the cause is chained) and ``ConfigError`` (its options). A
``TreadleError`` raised by the plugin passes unchanged. None of them belongs into the step loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from treadle.config import PluginConfig
from treadle.errors import TreadleError
from treadle.plugins import backends as bids
from treadle.plugins import matching
from treadle.plugins.entries import scan
from treadle.plugins.registry import Registry, Source, log
from treadle.plugins.selection import Plan
from treadle.plugins.switches import Switches

if TYPE_CHECKING:
    from treadle.api import types as t
    from treadle.config import EngineConfig

__all__ = ("Host",)


class Host(Registry):
    """Owns the plugins of one engine. Never global: two engines have two hosts."""

    @classmethod
    def from_plan(
        cls, plan: Plan, config: PluginConfig | None = None, *, source: Source | None = None
    ) -> Host:
        """The host of a worker process: no choosing, and a refusal where installations differ."""
        own = msgspec.structs.replace(
            config or PluginConfig(), plugin=[], no_plugin=[], plugin_file=[], locked=None
        )
        # The parent has applied pins and switches; this process's environment must not add its own.
        switches = Switches(strict=own.plugin_strict)
        return cls(own, source=lambda: plan.entries(source or scan), switches=switches)

    # -- finding and reading a checkpoint --------------------------------------------

    def model_source(self, scheme: str) -> t.ModelSource:
        kind = "model_sources"
        found = self.only(kind, scheme).treadle_model_source(
            scheme=scheme, options=self.options(kind, scheme)
        )
        return self.answered(kind, scheme, found)

    def load_format(self, format: str, files: t.ModelFiles) -> t.WeightLoader:
        kind = "load_formats"
        found = self.only(kind, format).treadle_load_format(
            format=format, files=files, options=self.options(kind, format)
        )
        return self.answered(kind, format, found)

    def tokenizer(self, mode: str, files: t.ModelFiles) -> t.Tokenizer:
        kind = "tokenizers"
        found = self.only(kind, mode).treadle_tokenizer(
            mode=mode, files=files, options=self.options(kind, mode)
        )
        return self.answered(kind, mode, found)

    def renderer(self, mode: str, files: t.ModelFiles, tokenizer: t.Tokenizer) -> t.ChatRenderer:
        kind = "renderers"
        found = self.only(kind, mode).treadle_renderer(
            mode=mode, files=files, tokenizer=tokenizer, options=self.options(kind, mode)
        )
        return self.answered(kind, mode, found)

    # -- building the model ----------------------------------------------------------

    def model(self, architecture: str, hf_config: Any) -> t.ModelSpec:
        kind = "models"
        found = self.only(kind, architecture).treadle_model(
            architecture=architecture, hf_config=hf_config, options=self.options(kind, architecture)
        )
        return self.answered(kind, architecture, found)

    def quantization(
        self, method: str, checkpoint: Mapping[str, Any], device: t.DeviceInfo
    ) -> t.QuantizationScheme:
        kind = "quantization"
        found = self.only(kind, method).treadle_quantization(
            method=method, checkpoint=checkpoint, device=device, options=self.options(kind, method)
        )
        return self.answered(kind, method, found)

    def multimodal(self, architecture: str, files: t.ModelFiles) -> t.MultimodalProcessor:
        kind = "multimodal"
        found = self.only(kind, architecture).treadle_multimodal(
            architecture=architecture, files=files, options=self.options(kind, architecture)
        )
        return self.answered(kind, architecture, found)

    def attention(self, request: t.AttentionRequest, pin: str | None = None) -> t.Offer:
        """The best offer, or that of the backend ``pin``.

        Raises ``PluginNotFoundError`` with every refusal if nobody offers, ``ConfigError`` if the
        pinned backend refuses.
        """
        if pin is not None:
            return bids.pinned(self, request, pin)
        return bids.best(self, request)

    def attention_bids(self, request: t.AttentionRequest) -> tuple[list[t.Offer], list[t.Refusal]]:
        """All offers, the best first, and all refusals. A broken backend is a refusal."""
        return bids.attention(self, request)

    def kernel(self, op: str, request: t.KernelRequest) -> t.KernelOffer | None:
        """The best offer for one operation, or ``None``: the layers then use their own."""
        return bids.kernel(self, op, request)

    def kernel_bids(
        self, op: str, request: t.KernelRequest
    ) -> tuple[list[t.KernelOffer], list[t.Refusal]]:
        """All offers for one operation, the best first, and all refusals."""
        return bids.kernels(self, op, request)

    # -- running it ------------------------------------------------------------------

    def executor(self, name: str, config: EngineConfig) -> t.Executor:
        kind = "executors"
        found = self.only(kind, name).treadle_executor(
            name=name, config=config, host=self, options=self.options(kind, name)
        )
        return self.answered(kind, name, found)

    def policy(self, name: str) -> t.SchedulingPolicy:
        kind = "policies"
        found = self.only(kind, name).treadle_policy(name=name, options=self.options(kind, name))
        return self.answered(kind, name, found)

    def proposer(self, name: str, config: EngineConfig) -> t.Proposer:
        kind = "proposers"
        found = self.only(kind, name).treadle_proposer(
            name=name, config=config, options=self.options(kind, name)
        )
        return self.answered(kind, name, found)

    def kv_connector(
        self, name: str, role: t.ConnectorRole, layout: t.CacheLayout
    ) -> t.KVConnector:
        kind = "kv_connectors"
        found = self.only(kind, name).treadle_kv_connector(
            name=name, role=role, layout=layout, options=self.options(kind, name)
        )
        return self.answered(kind, name, found)

    def logits_processors(self, names: Sequence[str], vocab_size: int) -> list[t.LogitsProcessor]:
        """One processor for each name, in that order."""
        kind = "logits_processors"
        return [
            self.answered(
                kind,
                name,
                self.only(kind, name).treadle_logits_processor(
                    name=name, vocab_size=vocab_size, options=self.options(kind, name)
                ),
            )
            for name in names
        ]

    def lora_resolvers(self, names: Sequence[str]) -> list[t.LoRAResolver]:
        """One resolver for each name, in that order."""
        kind = "lora_resolvers"
        return [
            self.answered(
                kind,
                name,
                self.only(kind, name).treadle_lora_resolver(
                    name=name, options=self.options(kind, name)
                ),
            )
            for name in names
        ]

    def stat_loggers(self, names: Sequence[str]) -> list[t.StatLogger]:
        """One logger for each name, in that order."""
        kind = "stat_loggers"
        return [
            self.answered(
                kind,
                name,
                self.only(kind, name).treadle_stat_logger(
                    name=name, options=self.options(kind, name)
                ),
            )
            for name in names
        ]

    # -- choosing by what the model is -----------------------------------------------

    def match(self, kind: str, key: str, model: t.ModelTraits) -> t.Match | None:
        """Whether the plugin of a key is made for a model. Most kinds are not asked."""
        return self.only(kind, key).treadle_match(
            kind=kind, key=key, model=model, options=self.options(kind, key)
        )

    def matches(self, kind: str, model: t.ModelTraits) -> list[matching.Candidate]:
        """What every plugin of a kind says of a model, the best match first. A broken one is
        logged and matches nothing."""
        return matching.candidates(self, kind, model)

    # -- shaping what comes out ------------------------------------------------------

    def grammar_compiler(
        self, name: str, tokenizer: t.Tokenizer, vocab_size: int
    ) -> t.GrammarCompiler:
        kind = "guided"
        found = self.only(kind, name).treadle_grammar_compiler(
            name=name, tokenizer=tokenizer, vocab_size=vocab_size, options=self.options(kind, name)
        )
        return self.answered(kind, name, found)

    def tool_parser(
        self, name: str, tokenizer: t.Tokenizer, tools: Sequence[t.Tool]
    ) -> t.ToolParser:
        kind = "tool_parsers"
        found = self.only(kind, name).treadle_tool_parser(
            name=name, tokenizer=tokenizer, tools=tools, options=self.options(kind, name)
        )
        return self.answered(kind, name, found)

    def reasoning_parser(
        self, name: str, tokenizer: t.Tokenizer, prompt: str = ""
    ) -> t.ReasoningParser:
        kind = "reasoning"
        found = self.only(kind, name).treadle_reasoning_parser(
            name=name, tokenizer=tokenizer, prompt=prompt, options=self.options(kind, name)
        )
        return self.answered(kind, name, found)

    # -- extensions ------------------------------------------------------------------

    def configure(self, config: EngineConfig) -> None:
        """Show the configuration to the extensions, in name order.

        If one fails, those before it are unconfigured and ``PluginLoadError`` is raised.
        """
        for entry in self._start():
            try:
                self._alone(entry).treadle_configure(config=config)
            except Exception:
                self.unconfigure()
                raise
            self._configured.append(entry)

    def unconfigure(self) -> None:
        """Let the configured extensions release what they hold. A failure is logged, not raised."""
        while self._configured:
            entry = self._configured.pop()
            try:
                self._alone(entry).treadle_unconfigure()
            except Exception as error:  # the others must still be released
                log.error("%s", error, exc_info=error)

    def report(self) -> list[str]:
        """One line from each loaded plugin that has something to say."""
        lines: list[str] = []
        named: set[int] = set()
        self._start()
        for entry in sorted(self.entries, key=lambda e: (e.dist, e.id)):
            if entry.state == "loaded" and (plugin := id(self._loader.load(entry))) not in named:
                named.add(plugin)
                try:
                    lines += [
                        f"{entry.owner}: {text}" for text in self._alone(entry).treadle_report()
                    ]
                except TreadleError as error:
                    lines.append(f"{entry.owner}: treadle_report failed: {error}")
        return lines
