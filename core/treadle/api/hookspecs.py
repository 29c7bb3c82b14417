"""All hooks that the core calls.

Three rules apply to all of them. A hook returns ``None`` if it does not provide the requested
object. A hook only creates objects; the step loop does not call hooks. A hook imports heavy
modules in its body, never at module level.

``options`` is the plugin's own configuration (``--plugin.KIND.KEY.option=value``). An
implementation declares only the arguments that it uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from treadle.api import types as t
    from treadle.config import EngineConfig

__all__ = ("PROJECT", "AllResultsHooks", "FirstResultHooks", "Options", "Plugin", "impl", "spec")

PROJECT = "treadle"
spec = pluggy.HookspecMarker(PROJECT)
impl = pluggy.HookimplMarker(PROJECT)

Options = Mapping[str, Any]


class FirstResultHooks:
    """Hooks called for one plugin, the owner of the key. The first result is used."""

    # Finding and reading a checkpoint

    @spec(firstresult=True)
    def treadle_model_source(self, scheme: str, options: Options) -> t.ModelSource | None:
        """Return a source of checkpoints: ``hf``, ``file``, ``demo``."""

    @spec(firstresult=True)
    def treadle_load_format(
        self, format: str, files: t.ModelFiles, seed: int, options: Options
    ) -> t.WeightLoader | None:
        """Return a loader for the tensors of a checkpoint in a file format.

        ``seed`` is the engine's, for formats with random weights.
        """

    @spec(firstresult=True)
    def treadle_tokenizer(
        self, mode: str, files: t.ModelFiles, options: Options
    ) -> t.Tokenizer | None:
        """Return a tokenizer."""

    @spec(firstresult=True)
    def treadle_renderer(
        self, mode: str, files: t.ModelFiles, tokenizer: t.Tokenizer, options: Options
    ) -> t.ChatRenderer | None:
        """Return a renderer, which converts chat messages to a prompt."""

    # Building the model

    @spec(firstresult=True)
    def treadle_model_config(
        self, architecture: str, config: Mapping[str, Any], options: Options
    ) -> Mapping[str, Any] | None:
        """Return the fields of a ``config.json`` as transformers reads them.

        Optional: without it, or if it returns ``None``, transformers reads and validates the file,
        which takes a second of each start. ``dtype`` is a name; defaults must be filled in.
        """

    @spec(firstresult=True)
    def treadle_model(
        self, architecture: str, hf_config: Any, options: Options
    ) -> t.ModelSpec | None:
        """Return the spec of a model architecture of ``config.architectures``."""

    @spec(firstresult=True)
    def treadle_quantization(
        self, method: str, checkpoint: Mapping[str, Any], device: t.DeviceInfo, options: Options
    ) -> t.QuantizationScheme | None:
        """Return the quantization scheme of a checkpoint's ``quantization_config``."""

    # Running it

    @spec(firstresult=True)
    def treadle_executor(
        self, name: str, config: EngineConfig, plugins: Any, options: Options
    ) -> t.Executor | None:
        """Return an executor: ``uni``, ``mp``, ``ray``. ``plugins``: plugin manager."""

    @spec(firstresult=True)
    def treadle_scheduling_policy(self, name: str, options: Options) -> t.SchedulingPolicy | None:
        """Return a scheduling policy."""

    @spec(firstresult=True)
    def treadle_logits_processor(
        self, name: str, vocab_size: int, options: Options
    ) -> t.LogitsProcessor | None:
        """Return a logits processor."""

    @spec(firstresult=True)
    def treadle_stat_logger(self, name: str, options: Options) -> t.StatLogger | None:
        """Return a receiver of the engine's statistics."""

    # Matching plugins to a model

    @spec(firstresult=True)
    def treadle_match(
        self, kind: str, key: str, model: t.ModelTraits, options: Options
    ) -> t.Match | None:
        """Return whether the plugin ``kind:key`` fits a model.

        Called for tool parsers, reasoning parsers, renderers and quantization if their option is
        ``auto``. A plugin without this hook is only used by name. For structured output backends,
        the scores are the default order in which they are tried; ``model`` is then empty.
        """

    # Structured output and parsing

    @spec(firstresult=True)
    def treadle_grammar_compiler(
        self, name: str, tokenizer: t.Tokenizer, vocab_size: int, options: Options
    ) -> t.GrammarCompiler | None:
        """Return a compiler of schemas, regexes and grammars for a vocabulary."""

    @spec(firstresult=True)
    def treadle_tool_parser(
        self, name: str, tokenizer: t.Tokenizer, tools: Sequence[t.Tool], options: Options
    ) -> t.ToolParser | None:
        """Return a parser for the tool calls of a response."""

    @spec(firstresult=True)
    def treadle_reasoning_parser(
        self, name: str, tokenizer: t.Tokenizer, prompt: str, options: Options
    ) -> t.ReasoningParser | None:
        """Return a parser that separates reasoning from the answer.

        ``prompt`` is the rendered prompt; it may already contain the opening tag.
        """


class AllResultsHooks:
    """Hooks called for every active plugin of the kind."""

    @spec
    def treadle_attention_backend(
        self, request: t.AttentionRequest, options: Options
    ) -> t.AttentionOffer | t.Refusal | None:
        """Offer a backend for an attention configuration. The highest score is selected."""

    @spec
    def treadle_kernel_op(
        self, op: str, request: t.KernelRequest, options: Options
    ) -> t.KernelOffer | t.Refusal | None:
        """Offer a kernel for a kernel op, such as ``rms_norm``. The highest score is selected."""

    @spec
    def treadle_communicator(
        self, request: t.CommunicatorRequest, options: Options
    ) -> t.CommunicatorOffer | t.Refusal | None:
        """Offer the communication of a TP group. The highest score is selected.

        Without an offer the ranks use NCCL, or gloo on CPUs.
        """

    @spec
    def treadle_configure(self, config: EngineConfig) -> None:
        """Receive the engine configuration before anything is built."""

    @spec
    def treadle_unconfigure(self) -> None:
        """Release the resources of ``treadle_configure``."""

    @spec
    def treadle_report(self) -> str | None:
        """Return a line for ``treadle doctor``."""


class Plugin(FirstResultHooks, AllResultsHooks):
    """Base class for plugins: a type checker then compares their hooks with the specs."""
