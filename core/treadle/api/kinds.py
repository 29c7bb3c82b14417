"""The kinds of plugins that the core calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.api import result_checks as checks
from treadle.api import types as t
from treadle.api.hookspecs import AllResultsHooks
from treadle.api.plugin_kind import MethodRules, PluginKind
from treadle.errors import EngineDeadError, EngineError, PluginLoadError, RequestError

__all__ = (
    "ATTENTION_BACKENDS",
    "COMMUNICATORS",
    "CORE_KINDS",
    "EXECUTORS",
    "EXTENSIONS",
    "KERNEL_OPS",
    "LOAD_FORMATS",
    "LOGITS_PROCESSORS",
    "MODELS",
    "MODEL_SOURCES",
    "QUANTIZATION",
    "REASONING_PARSERS",
    "RENDERERS",
    "SCHEDULING_POLICIES",
    "STAT_LOGGERS",
    "STRUCTURED_OUTPUT",
    "TOKENIZERS",
    "TOOL_PARSERS",
)

# Called too often in a step to count each call.
HOT = MethodRules(in_step=True, counted=False)

MODEL_SOURCES = PluginKind(
    name="model_sources",
    key="URI scheme",
    hook="treadle_model_source",
    builds=t.ModelSource,
    key_argument="scheme",
    loads="resolve",
    optional=(t.SupportsRevisions,),
    suite="treadle.testing.sources:ModelSourceSuite",
    suite_needs_subclass=True,
)
LOAD_FORMATS = PluginKind(
    name="load_formats",
    key="checkpoint format",
    hook="treadle_load_format",
    builds=t.WeightLoader,
    key_argument="format",
    optional=(t.SupportsTensorFiles, t.SupportsFill),
    option="--load-format",
    methods={
        "WeightLoader.tensors": MethodRules(item=checks.named_tensor),
        "SupportsTensorFiles.file_of": MethodRules(
            fallback=lambda error, name: f"a file whose name is not known ({error})"
        ),
    },
    suite="treadle.testing.sources:LoadFormatSuite",
    suite_needs_subclass=True,
)
TOKENIZERS = PluginKind(
    name="tokenizers",
    key="tokenizer mode",
    hook="treadle_tokenizer",
    builds=t.Tokenizer,
    key_argument="mode",
    optional=(t.SupportsManyTokens,),
    methods={
        "Tokenizer.encode": MethodRules(result=checks.encoded),
        "Tokenizer.decode": MethodRules(result=checks.decoded),
        "Tokenizer.id_to_token": MethodRules(result=checks.decoded),
        "Tokenizer.token_bytes": HOT,
        "IncrementalDetokenizer.decode_next": replace(HOT, result=checks.decoded),
        "SupportsManyTokens.decode_many": replace(HOT, result=checks.decoded),
        "IncrementalDetokenizer.flush": MethodRules(result=checks.decoded),
    },
    option="--tokenizer-mode",
    suite="treadle.testing.text:TokenizerSuite",
)
RENDERERS = PluginKind(
    name="renderers",
    key="renderer mode",
    hook="treadle_renderer",
    builds=t.ChatRenderer,
    key_argument="mode",
    methods={"ChatRenderer.encode": MethodRules(result=checks.encoded)},
    failure="request",
    budget=2.0,
    matches=True,
    option="--renderer",
    suite="treadle.testing.text:RendererSuite",
)
MODELS = PluginKind(
    name="models",
    key="architecture",
    hook="treadle_model",
    builds=t.ModelSpec,
    key_argument="architecture",
    methods={
        "ModelSpec.build": MethodRules(result=checks.any_result),
        "CausalModel.forward": MethodRules(in_step=True, result=checks.hidden_states),
        "CausalModel.compute_logits": MethodRules(in_step=True),
    },
    suite="treadle.testing.architectures:ModelSuite",
)
QUANTIZATION = PluginKind(
    name="quantization",
    key="quant_method",
    hook="treadle_quantization",
    builds=t.QuantizationScheme,
    key_argument="method",
    optional=(t.SupportsGatedInput, t.SupportsWeightRenaming),
    methods={
        "SupportsWeightRenaming.rename": MethodRules(counted=False),
        "LinearMethod.apply": replace(HOT, result=checks.linear_result),
        "SupportsGatedInput.apply_gated": replace(HOT, result=checks.linear_result),
        "ExpertsMethod.apply": replace(HOT, result=checks.experts_result),
    },
    matches=True,
    option="--quantization",
    suite="treadle.testing.quantization:QuantizationSuite",
    suite_needs_subclass=True,
)

ATTENTION_BACKENDS = PluginKind(
    name="attention_backends",
    key="backend",
    hook="treadle_attention_backend",
    builds=t.AttentionOffer,
    specs=AllResultsHooks,
    mode="best",
    option="--attention-backend",
    optional=(t.SupportsExternalKVWrite, t.SupportsOutputBuffer),
    methods={
        "AttentionBackend.kv_cache_shape": MethodRules(result=checks.page_sizes),
        "AttentionBackend.build_metadata": MethodRules(in_step=True),
        "AttentionBackend.forward": replace(HOT, result=checks.same_shape),
        "SupportsExternalKVWrite.slot_mapping": HOT,
        "SupportsOutputBuffer.forward_into": HOT,
    },
    suite="treadle.testing.attention:AttentionSuite",
)
KERNEL_OPS = PluginKind(
    name="kernel_ops",
    key="backend",
    hook="treadle_kernel_op",
    builds=t.KernelOffer,
    specs=AllResultsHooks,
    mode="best",
    suite="treadle.testing.kernels:KernelSuite",
)
COMMUNICATORS = PluginKind(
    name="communicators",
    key="backend",
    hook="treadle_communicator",
    builds=t.CommunicatorOffer,
    specs=AllResultsHooks,
    mode="best",
    optional=(t.SupportsFusedOps, t.SupportsDryRun),
    methods={
        "Communicator.all_reduce": HOT,
        "Communicator.all_gather": HOT,
        "Communicator.all_reduce_min": MethodRules(in_step=True),
        "FusedOp.run": replace(HOT, result=checks.any_result),
    },
    suite="treadle.testing.communicators:CommunicatorSuite",
)
EXECUTORS = PluginKind(
    name="executors",
    hook="treadle_executor",
    builds=t.Executor,
    methods={"Executor.start": MethodRules(error=PluginLoadError)},
    error=EngineDeadError,
    loads="start",
    option="--distributed-executor-backend",
    suite="treadle.testing.executors:ExecutorSuite",
)
SCHEDULING_POLICIES = PluginKind(
    name="scheduling_policies",
    hook="treadle_scheduling_policy",
    builds=t.SchedulingPolicy,
    methods={
        "SchedulingPolicy.sort_key": MethodRules(result=checks.SortKey, in_step=True),
        "SchedulingPolicy.select_victim": MethodRules(
            result=checks.index_into, fallback=checks.latest_arrival, in_step=True
        ),
    },
    failure="request",
    error=EngineError,
    budget=0.005,
    option="--scheduling-policy",
    suite="treadle.testing.policies:PolicySuite",
)
LOGITS_PROCESSORS = PluginKind(
    name="logits_processors",
    hook="treadle_logits_processor",
    builds=t.LogitsProcessor,
    mode="many",
    methods={
        "LogitsProcessor.validate_params": MethodRules(replies=(RequestError,), in_step=True),
        "LogitsProcessor.apply": MethodRules(in_step=True, result=checks.edited_logits),
    },
    failure="request",
    budget=0.02,
    option="--logits-processors",
    suite="treadle.testing.logits:LogitsProcessorSuite",
    suite_needs_subclass=True,
)
STAT_LOGGERS = PluginKind(
    name="stat_loggers",
    hook="treadle_stat_logger",
    builds=t.StatLogger,
    mode="many",
    failure="itself",
    budget=0.005,
    option="--stat-loggers",
    suite="treadle.testing.stats:StatLoggerSuite",
)

STRUCTURED_OUTPUT = PluginKind(
    name="structured_output",
    key="backend",
    hook="treadle_grammar_compiler",
    builds=t.GrammarCompiler,
    methods={
        "GrammarMatcher.fill_bitmask": MethodRules(in_step=True),
        "GrammarMatcher.accept_token": MethodRules(in_step=True, result=checks.accepted_token),
        "GrammarMatcher.is_accepting": HOT,
        "GrammarMatcher.is_terminated": HOT,
        "SupportsForcedTokens.forced_tokens": HOT,
        "SupportsGrammarBatches.fill_bitmasks": MethodRules(
            in_step=True, result=checks.one_for_each_matcher
        ),
        "SupportsGrammarBatches.accept_tokens": MethodRules(
            in_step=True, result=checks.one_for_each_matcher
        ),
    },
    optional=(t.SupportsForcedTokens, t.SupportsGrammarBatches, t.SupportsUnenforced),
    failure="request",
    matches=True,
    option="--structured-output-backends",
    suite="treadle.testing.structured_output:StructuredOutputSuite",
)
PARSER_METHODS = {
    "StreamParser.feed": MethodRules(in_step=True, result=checks.deltas),
    "StreamParser.finish": MethodRules(in_step=True, result=checks.deltas),
    "ToolParser.grammar_for_tool_choice": MethodRules(
        result=checks.tool_grammar, replies=(RequestError,)
    ),
    "SupportsSpecialTags.special_tags": MethodRules(in_step=True, result=lambda tags: tuple(tags)),
    "SupportsCallIds.call_id": MethodRules(in_step=True, result=checks.call_id),
}
TOOL_PARSERS = PluginKind(
    name="tool_parsers",
    hook="treadle_tool_parser",
    builds=t.ToolParser,
    optional=(t.SupportsCallIds, t.SupportsSpecialTags),
    methods=PARSER_METHODS,
    failure="request",
    budget=0.25,
    matches=True,
    option="--tool-call-parser",
    suite="treadle.testing.parsers:ToolParserSuite",
)
REASONING_PARSERS = PluginKind(
    name="reasoning_parsers",
    hook="treadle_reasoning_parser",
    builds=t.ReasoningParser,
    optional=(t.SupportsReasoningCloser, t.SupportsReasoningOpener, t.SupportsSpecialTags),
    methods=PARSER_METHODS,
    failure="request",
    budget=0.25,
    matches=True,
    option="--reasoning-parser",
    suite="treadle.testing.parsers:ReasoningSuite",
)
EXTENSIONS: PluginKind[None] = PluginKind(
    name="extensions",
    hook="treadle_configure",
    builds=None,
    specs=AllResultsHooks,
    mode="always",
    failure="itself",
    suite="treadle.testing.extensions:ExtensionSuite",
)

CORE_KINDS: Sequence[PluginKind[Any]] = tuple(
    value for value in tuple(vars().values()) if isinstance(value, PluginKind)
)
"""Every kind of this module, in its order."""
