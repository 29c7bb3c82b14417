"""Every hook that the core calls.

Three rules hold for all of them. A hook returns ``None`` for "not mine". A hook builds an object
and returns it; nothing in the step loop calls a hook. A hook imports what is heavy inside its
body, never at module level.

``options`` is the plugin's own configuration (``--plugin.KIND.KEY.option=value``); an
implementation names only the arguments that it uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from treadle.api import types as t
    from treadle.config import EngineConfig

__all__ = ("PROJECT", "Every", "First", "Options", "Plugin", "impl", "spec")

PROJECT = "treadle"
spec = pluggy.HookspecMarker(PROJECT)
impl = pluggy.HookimplMarker(PROJECT)

Options = Mapping[str, Any]


class First:
    """Called with one plugin active for the key; the first answer wins."""

    # Finding and reading a checkpoint

    @spec(firstresult=True)
    def treadle_model_source(self, scheme: str, options: Options) -> t.ModelSource | None:
        """Open a source of checkpoints: ``hf``, ``file``, ``demo``."""

    @spec(firstresult=True)
    def treadle_load_format(
        self, format: str, files: t.ModelFiles, seed: int, options: Options
    ) -> t.WeightLoader | None:
        """Open the tensors of a checkpoint stored in one file format. ``seed`` is the engine's, for
        formats that make up the weights."""

    @spec(firstresult=True)
    def treadle_tokenizer(
        self, mode: str, files: t.ModelFiles, options: Options
    ) -> t.Tokenizer | None:
        """Open a tokenizer."""

    @spec(firstresult=True)
    def treadle_renderer(
        self, mode: str, files: t.ModelFiles, tokenizer: t.Tokenizer, options: Options
    ) -> t.ChatRenderer | None:
        """Turn chat messages into prompt tokens."""

    # Building the model

    @spec(firstresult=True)
    def treadle_model(
        self, architecture: str, hf_config: Any, options: Options
    ) -> t.ModelSpec | None:
        """Describe a model architecture named by ``config.architectures``."""

    @spec(firstresult=True)
    def treadle_quantization(
        self, method: str, checkpoint: Mapping[str, Any], device: t.DeviceInfo, options: Options
    ) -> t.QuantizationScheme | None:
        """Turn a checkpoint's ``quantization_config`` into a scheme."""

    @spec(firstresult=True)
    def treadle_multimodal(
        self, architecture: str, files: t.ModelFiles, options: Options
    ) -> t.MultimodalProcessor | None:
        """Prepare images, audio or video for one architecture."""

    # Running it

    @spec(firstresult=True)
    def treadle_executor(
        self, name: str, config: EngineConfig, host: Any, options: Options
    ) -> t.Executor | None:
        """Start workers: ``inline``, ``processes``, ``ray``. ``host`` is the plugin host."""

    @spec(firstresult=True)
    def treadle_policy(self, name: str, options: Options) -> t.SchedulingPolicy | None:
        """Order admissions and choose whom to preempt."""

    @spec(firstresult=True)
    def treadle_proposer(
        self, name: str, config: EngineConfig, options: Options
    ) -> t.Proposer | None:
        """Draft tokens for speculative decoding."""

    @spec(firstresult=True)
    def treadle_kv_connector(
        self, name: str, role: t.ConnectorRole, layout: t.CacheLayout, options: Options
    ) -> t.KVConnector | None:
        """Move KV pages in and out of this engine."""

    @spec(firstresult=True)
    def treadle_logits_processor(
        self, name: str, vocab_size: int, options: Options
    ) -> t.LogitsProcessor | None:
        """Edit a batch of logits before sampling."""

    @spec(firstresult=True)
    def treadle_lora_resolver(self, name: str, options: Options) -> t.LoRAResolver | None:
        """Find adapters that were not named at start-up."""

    @spec(firstresult=True)
    def treadle_stat_logger(self, name: str, options: Options) -> t.StatLogger | None:
        """Receive engine statistics once per step."""

    # Choosing by what the model is

    @spec(firstresult=True)
    def treadle_match(
        self, kind: str, key: str, model: t.ModelTraits, options: Options
    ) -> t.Match | None:
        """Say whether the plugin ``kind:key`` is made for a model. Called for tool parsers, reasoning
        parsers, renderers and quantization if the option is ``auto``; without this hook, a plugin
        is used only by name. For guided decoding backends the scores say in which order they are
        tried if no option names them; ``model`` is then empty."""

    # Shaping what comes out

    @spec(firstresult=True)
    def treadle_grammar_compiler(
        self, name: str, tokenizer: t.Tokenizer, vocab_size: int, options: Options
    ) -> t.GrammarCompiler | None:
        """Compile schemas, regexes and grammars for one vocabulary (``vocab_size`` logits)."""

    @spec(firstresult=True)
    def treadle_tool_parser(
        self, name: str, tokenizer: t.Tokenizer, tools: Sequence[t.Tool], options: Options
    ) -> t.ToolParser | None:
        """Open a parser for the tool calls of one response."""

    @spec(firstresult=True)
    def treadle_reasoning_parser(
        self, name: str, tokenizer: t.Tokenizer, prompt: str, options: Options
    ) -> t.ReasoningParser | None:
        """Open a parser that separates reasoning from the answer. ``prompt`` is the rendered
        prompt, whose end may have opened the reasoning already."""


class Every:
    """Called on every active plugin of the kind."""

    @spec
    def treadle_attention(
        self, request: t.AttentionRequest, options: Options
    ) -> t.Offer | t.Refusal | None:
        """Bid for one attention configuration; the highest score wins."""

    @spec
    def treadle_kernel(
        self, op: str, request: t.KernelRequest, options: Options
    ) -> t.KernelOffer | t.Refusal | None:
        """Bid for one operation used by the layers: ``rms_norm``, ``rope``, ``experts``."""

    @spec
    def treadle_configure(self, config: EngineConfig) -> None:
        """See the engine configuration before anything is built."""

    @spec
    def treadle_unconfigure(self) -> None:
        """Release what ``treadle_configure`` acquired."""

    @spec
    def treadle_report(self) -> str | None:
        """Add one line to ``treadle doctor``."""


class Plugin(First, Every):
    """Subclass this to have a type checker compare your hooks with the specs."""
