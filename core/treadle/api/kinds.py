"""The kinds of plugins that the core calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from treadle.api import types as t
from treadle.api.hookspecs import AllResultsHooks
from treadle.api.plugin_kind import MethodRules, PluginKind, any_result, unexpected
from treadle.errors import EngineDeadError, EngineError, PluginLoadError, RequestError

__all__ = (
    "ATTENTION_BACKENDS",
    "COMMUNICATORS",
    "CORE_KINDS",
    "EXECUTORS",
    "EXTENSIONS",
    "KERNEL_OPS",
    "KV_CONNECTORS",
    "LOAD_FORMATS",
    "LOGITS_PROCESSORS",
    "LORA_RESOLVERS",
    "MODELS",
    "MODEL_SOURCES",
    "MULTIMODAL_PROCESSORS",
    "PROPOSERS",
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

MAX_ID_CHARS = 64


# ------------------------------------------------------------------------------ results


def _named_tensor(item: Any) -> tuple[str, Any]:
    name, tensor = item
    if not isinstance(name, str) or not hasattr(tensor, "shape"):
        raise unexpected(item, "the name of a tensor and the tensor")
    return name, tensor


def _of_shape(y: Any, shape: Sequence[int]) -> Any:
    if y.shape == shape:
        return y
    raise unexpected(y, f"a tensor {list(shape)}")


def _same_shape(y: Any, q: Any, *_: Any) -> Any:
    return _of_shape(y, q.shape)


def _cache_shape(shape: Any, *_: Any) -> tuple[int, ...]:
    if isinstance(shape, Sequence) and all(isinstance(n, int) and n > 0 for n in shape):
        return tuple(shape)
    raise unexpected(shape, "a tuple of sizes")


def _hidden_states(hidden: Any, ids: Any, positions: Any, forward_ctx: t.ForwardContext) -> Any:
    shape: tuple[int, ...] = getattr(hidden, "shape", ())
    few = ids if forward_ctx.logits_indices is None else forward_ctx.logits_indices
    if len(shape) == 2 and shape[0] in (len(ids), len(few)):
        return hidden
    raise unexpected(hidden, f"a tensor [{len(ids)}, hidden]")


def _edited(y: Any, logits: Any, *_: Any) -> Any:
    if all(getattr(y, n, None) == getattr(logits, n) for n in ("shape", "dtype", "device")):
        return y
    raise unexpected(y, f"a tensor {list(logits.shape)} of {logits.dtype}")


def _linear_result(y: Any, module: Any, *_: Any) -> Any:
    if y.shape[-1] == module.out_features:
        return y
    raise unexpected(y, f"a tensor whose last size is {module.out_features}")


def _experts_result(y: Any, module: Any, x: Any, chosen: Any, *_: Any) -> Any:
    return _of_shape(y, (*chosen.shape, x.shape[1]))


class _SortKey:
    """A tuple of finite numbers, equally long for every request."""

    def __init__(self) -> None:
        self.length = 0

    def __call__(self, result: Any, *_: Any) -> tuple[float, ...]:
        key = tuple(float(value) for value in result)
        if not key or not all(map(isfinite, key)):
            raise ValueError(f"{key!r} is not a sort key; a tuple of finite numbers is")
        if len(key) != (self.length or len(key)):
            raise ValueError(f"{key!r} must have {self.length} numbers, like the keys before it")
        self.length = len(key)
        return key


def _index_into(index: Any, running: Sequence[Any]) -> int:
    position = int(index)
    if 0 <= position < len(running):
        return position
    raise IndexError(f"victim {index} is not one of {len(running)} requests")


def _latest_arrival(error: BaseException, running: Sequence[t.QueuedRequest]) -> int:
    return max(range(len(running)), key=lambda i: running[i].arrival_time)


def _deltas(deltas: Any, *_: Any) -> list[t.Delta]:
    """What a parser returned, as a list; half a surrogate pair cannot be sent."""
    found: list[t.Delta] = list(deltas)
    for delta in found:
        match delta:
            case t.TextDelta(str(text)) | t.ReasoningDelta(str(text)):
                text.encode()
            case t.ToolCallDelta(int(index), str() | None as name, str(text)) if index >= 0:
                text.encode()
                (name or "").encode()
            case _:
                raise unexpected(delta, "a delta that can be sent")
    return found


def _tool_grammar(grammar: Any, *_: Any) -> t.GrammarSpec | None:
    match grammar:
        case None | t.GrammarSpec(kind=str(), source=str()):
            return grammar
    raise unexpected(grammar, "a grammar whose source is a text")


def _call_id(made: Any) -> str:
    if 0 < len(made) <= MAX_ID_CHARS and made.isprintable():
        return str(made)
    raise unexpected(made, f"a printable text of at most {MAX_ID_CHARS} characters")


def _allowed(result: Any, token: int) -> bool:
    if result:
        return True
    raise ValueError(f"the grammar does not allow token {token}, which its mask allowed")


# ------------------------------------------------------------- finding and reading models

MODEL_SOURCES = PluginKind(
    name="model_sources",
    key="URI scheme",
    hook="treadle_model_source",
    builds=t.ModelSource,
    key_argument="scheme",
    loads="resolve",
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
    methods={
        "WeightLoader.tensors": MethodRules(item=_named_tensor),
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
    methods={"Tokenizer.token_bytes": HOT, "IncrementalDetokenizer.decode_next": HOT},
    suite="treadle.testing.text:TokenizerSuite",
)
RENDERERS = PluginKind(
    name="renderers",
    key="renderer mode",
    hook="treadle_renderer",
    builds=t.ChatRenderer,
    key_argument="mode",
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
        "ModelSpec.build": MethodRules(result=any_result),
        "CausalModel.forward": MethodRules(in_step=True, result=_hidden_states),
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
        "LinearMethod.apply": replace(HOT, result=_linear_result),
        "SupportsGatedInput.apply_gated": replace(HOT, result=_linear_result),
        "ExpertsMethod.apply": replace(HOT, result=_experts_result),
    },
    matches=True,
    option="--quantization",
    suite="treadle.testing.quantization:QuantizationSuite",
    suite_needs_subclass=True,
)

# --------------------------------------------------------------------------- running them

ATTENTION_BACKENDS = PluginKind(
    name="attention_backends",
    key="backend",
    hook="treadle_attention_backend",
    builds=t.AttentionOffer,
    specs=AllResultsHooks,
    mode="best",
    option="--attention-backend",
    optional=(t.SupportsExternalKVWrite,),
    methods={
        "AttentionBackend.kv_cache_shape": MethodRules(result=_cache_shape),
        "AttentionBackend.build_metadata": MethodRules(in_step=True),
        "AttentionBackend.forward": replace(HOT, result=_same_shape),
        "SupportsExternalKVWrite.slot_mapping": HOT,
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
    optional=(t.SupportsFusedOps,),
    methods={
        "Communicator.all_reduce": HOT,
        "Communicator.all_gather": HOT,
        "Communicator.all_reduce_min": MethodRules(in_step=True),
        "FusedOp.run": replace(HOT, result=any_result),
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
    suite="treadle.testing.executors:ExecutorSuite",
)
SCHEDULING_POLICIES = PluginKind(
    name="scheduling_policies",
    hook="treadle_scheduling_policy",
    builds=t.SchedulingPolicy,
    methods={
        "SchedulingPolicy.sort_key": MethodRules(result=_SortKey, in_step=True),
        "SchedulingPolicy.select_victim": MethodRules(
            result=_index_into, fallback=_latest_arrival, in_step=True
        ),
    },
    failure="request",
    error=EngineError,
    budget=0.005,
    suite="treadle.testing.policies:PolicySuite",
)
LOGITS_PROCESSORS = PluginKind(
    name="logits_processors",
    hook="treadle_logits_processor",
    builds=t.LogitsProcessor,
    mode="many",
    methods={
        "LogitsProcessor.validate_params": MethodRules(replies=(RequestError,), in_step=True),
        "LogitsProcessor.apply": MethodRules(in_step=True, result=_edited),
    },
    failure="request",
    budget=0.02,
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
    suite="treadle.testing.stats:StatLoggerSuite",
)

# ---------------------------------------------------------------------- shaping the output

STRUCTURED_OUTPUT = PluginKind(
    name="structured_output",
    key="backend",
    hook="treadle_grammar_compiler",
    builds=t.GrammarCompiler,
    methods={
        "GrammarMatcher.fill_bitmask": MethodRules(in_step=True),
        "GrammarMatcher.accept_token": MethodRules(in_step=True, result=_allowed),
        "GrammarMatcher.is_accepting": HOT,
        "GrammarMatcher.is_terminated": HOT,
    },
    failure="request",
    matches=True,
    option="--structured-output-backends",
    suite="treadle.testing.structured_output:StructuredOutputSuite",
)
PARSER_METHODS = {
    "StreamParser.feed": MethodRules(in_step=True, result=_deltas),
    "StreamParser.finish": MethodRules(in_step=True, result=_deltas),
    "ToolParser.grammar_for_tool_choice": MethodRules(
        result=_tool_grammar, replies=(RequestError,)
    ),
    "SupportsSpecialTags.special_tags": MethodRules(in_step=True, result=lambda tags: tuple(tags)),
    "SupportsCallIds.call_id": MethodRules(in_step=True, result=_call_id),
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
    optional=(t.SupportsReasoningOpener, t.SupportsSpecialTags),
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

# ------------------------------------------------------------- declared, but not called yet

MULTIMODAL_PROCESSORS = PluginKind(
    name="multimodal_processors",
    key="architecture",
    hook="treadle_multimodal_processor",
    builds=t.MultimodalProcessor,
    key_argument="architecture",
    suite="treadle.testing.multimodal:MultimodalSuite",
    suite_needs_subclass=True,
    provisional=True,
)
PROPOSERS = PluginKind(
    name="proposers",
    hook="treadle_proposer",
    builds=t.Proposer,
    suite="treadle.testing.proposers:ProposerSuite",
    provisional=True,
)
KV_CONNECTORS = PluginKind(
    name="kv_connectors",
    hook="treadle_kv_connector",
    builds=t.KVConnector,
    suite="treadle.testing.connectors:KVConnectorSuite",
    provisional=True,
)
LORA_RESOLVERS = PluginKind(
    name="lora_resolvers",
    hook="treadle_lora_resolver",
    builds=t.LoRAResolver,
    mode="many",
    suite="treadle.testing.adapters:LoRAResolverSuite",
    suite_needs_subclass=True,
    provisional=True,
)

CORE_KINDS: Sequence[PluginKind[Any]] = tuple(
    value for value in tuple(vars().values()) if isinstance(value, PluginKind)
)
"""Every kind of this module, in its order."""
