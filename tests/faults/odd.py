"""A plugin of every kind that an engine calls: what is built in, until the options say otherwise.

``method`` goes wrong in the way ``failure`` from its call ``first_call`` on, ``times`` times; in the
process ``pid`` only, if that is given. If ``failure`` is the path of a named pipe, the method does not
return while there is a file beside it whose name ends in ``.closed``, until the pipe is opened. Grammars are asked by their source instead, so that one
backend serves many tests: ``fill_bitmask RuntimeError 2``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from treadle.api import impl
from treadle.api.types import KernelOffer, Refusal
from treadle.errors import CheckpointError, EngineDeadError, RequestError

TREADLE = {
    "model_sources": ["odd"],
    "load_formats": ["odd"],
    "tokenizers": ["odd"],
    "models": ["OddForCausalLM"],
    "quantization": ["odd"],
    "attention_backends": ["odd"],
    "kernel_ops": ["odd"],
    "executors": ["odd"],
    "scheduling_policies": ["odd"],
    "logits_processors": ["odd"],
    "stat_loggers": ["odd"],
    "structured_output": ["odd"],
}


class Options(msgspec.Struct, frozen=True):
    method: str = ""
    failure: str = "RuntimeError"
    first_call: int = 1
    times: int = 1 << 40
    pid: int = 0


TREADLE_OPTIONS = {f"{kind}:{key}": Options for kind, (key,) in TREADLE.items()}


class Panic(BaseException):
    """Like a panic of a Rust library, which is no Exception."""


RAISED: dict[str, type[BaseException]] = {
    "RuntimeError": RuntimeError,
    "KeyError": KeyError,
    "Panic": Panic,
    "CheckpointError": CheckpointError,
    "RequestError": RequestError,
    "EngineDeadError": EngineDeadError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
}
RETURNED: dict[str, Any] = {
    "None": lambda result: None,
    "text": lambda result: "odd",
    "False": lambda result: False,
    "narrow": lambda result: result[..., :-1],
    "few": lambda result: result[:-1],
    "NaN": lambda result: result * float("nan"),
    "one NaN": lambda result: result.index_fill(0, result.new_zeros(1).long(), float("nan")),
    "negative": lambda result: (-1,),
    "method": lambda result: lambda: result,
    "high score": lambda result: replace(result, score="high"),
    "no pages": lambda result: replace(result, page_sizes=()),
    "no reasons": lambda result: Refusal("odd", None),
    "deep": lambda result: msgspec.structs.replace(result, num_async_steps=1),
    "other step": lambda result: msgspec.structs.replace(result, id=result.id + 1),
    "no tokens": lambda result: msgspec.structs.replace(result, sampled_token_ids=[]),
}


class Fault:
    """What goes wrong, where, and how often it was asked for."""

    def __init__(self, options: Any) -> None:
        self._options = SimpleNamespace(**options)
        self._calls = 0

    @property
    def method(self) -> str:
        return str(self._options.method)

    def __call__(self, method: str, call: Any) -> Any:
        """What ``call`` returns, unless this is a call of ``method`` that goes wrong."""
        options = self._options
        if method != options.method or options.pid not in (0, os.getpid()):
            return call()
        self._calls += 1
        if not options.first_call <= self._calls < options.first_call + options.times:
            return call()
        if (path := Path(options.failure)).is_absolute():  # a pipe that holds up who opens it
            if path.with_suffix(".closed").exists():
                path.open().close()
            return call()
        if options.failure in RAISED:
            raise RAISED[options.failure]("odd")
        return RETURNED[options.failure](call())


class Proxy:
    """Calls of ``inner`` that may go wrong."""

    def __init__(self, inner: Any, fault: Fault) -> None:
        self._inner, self._fault = inner, fault

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if not callable(attribute):
            return self._fault(name, lambda: attribute)

        def call(*arguments: Any, **more: Any) -> Any:
            return self._fault(name, lambda: attribute(*arguments, **more))

        return call


def answer(options: Any, inner: Any, proxy: type[Proxy] = Proxy) -> Any:
    """What a hook returns: ``inner``, which may go wrong, or something wrong."""
    fault = Fault(options)
    return fault("hook", lambda: proxy(inner, fault))


# --------------------------------------------------------------- reading a checkpoint


@impl
def treadle_model_source(scheme: str, options: Any) -> Any:
    from treadle_demo import DemoSource

    return answer(options, DemoSource(), Source)


class Source(Proxy):
    def resolve_revision(self, ref: Any) -> Any:
        return self._fault("resolve_revision", lambda: "now")

    def resolve(self, ref: Any, *, patterns: Any) -> Any:
        ref = replace(ref, revision=None)
        return self._fault("resolve", lambda: self._inner.resolve(ref, patterns=patterns))


@impl
def treadle_load_format(format: str, files: Any, options: Any) -> Any:
    from treadle_weights_kit.mapped import SafetensorsLoader

    return answer(options, SafetensorsLoader(files), Loader)


class Loader(Proxy):
    def tensors(self, should_load: Any) -> Any:
        """The fault comes with a tensor, not with the call that returns a generator."""
        for pair in self._inner.tensors(should_load):
            yield self._fault("tensors", lambda pair=pair: pair)

    def file_of(self, name: str) -> Any:
        return self._fault("file_of", lambda: self._inner.file_of(name))


@impl
def treadle_tokenizer(mode: str, files: Any, options: Any) -> Any:
    from treadle_hf_tokenizer.tokenizer import AutoTokenizer

    return answer(options, AutoTokenizer.open(files), Tokenizer)


class Tokenizer(Proxy):
    chat_templates: dict[str, str] = {}  # not in the protocol, and asked before chat_template

    def create_detokenizer(self, *arguments: Any, **more: Any) -> Any:
        detokenizer = self._fault(
            "create_detokenizer", lambda: self._inner.create_detokenizer(*arguments, **more)
        )
        return detokenizer and Proxy(detokenizer, self._fault)


# ----------------------------------------------------------------- building the model


@impl
def treadle_model_config(config: Any, options: Any) -> Any:
    import treadle_llama

    read = treadle_llama.treadle_model_config
    return Fault(options)("treadle_model_config", lambda: read(config=config))


@impl
def treadle_model(architecture: str, hf_config: Any, options: Any) -> Any:
    import treadle_llama
    import treadle_mixtral

    fault = Fault(options)
    moe = hasattr(hf_config, "num_local_experts")
    home, name = (treadle_mixtral, "Mixtral") if moe else (treadle_llama, "Llama")
    spec = home.treadle_model(architecture=f"{name}ForCausalLM", hf_config=hf_config)

    def build(ctx: Any) -> Any:
        model = spec.build(ctx)
        kind = type(model)

        class Odd(kind):  # type: ignore[misc, valid-type]
            def forward(self, *arguments: Any) -> Any:
                return fault("forward", lambda: kind.forward(self, *arguments))

            def compute_logits(self, *arguments: Any) -> Any:
                return fault("compute_logits", lambda: kind.compute_logits(self, *arguments))

        model.__class__ = Odd
        return fault("build", lambda: model)

    return fault("hook", lambda: replace(spec, architecture=architecture, build=build))


@impl
def treadle_quantization(method: str, options: Any) -> Any:
    return answer(options, None, Scheme)


@impl
def treadle_match(kind: str, key: str, options: Any) -> Any:
    return Fault(options)("treadle_match", lambda: None)


class Scheme(Proxy):
    """Quantizes nothing, in a way of its own."""

    name = "odd"

    def linear_method(self, spec: Any) -> Any:
        from treadle_layers_kit.plain import PlainLinear

        class Gated(PlainLinear):
            def apply_gated(self, module: Any, x: Any, bias: Any) -> Any:
                from treadle_layers_kit import ops

                return self.apply(module, ops.silu_and_mul(x), bias)

        if not spec.prefix.startswith("model."):
            return None
        # Elsewhere it would be called in the place of ``apply``.
        kind = Gated if self._fault.method == "apply_gated" else PlainLinear
        return self._fault("linear_method", lambda: Proxy(kind(), self._fault))

    def experts_method(self, spec: Any) -> Any:
        from treadle_layers_kit.plain_experts import PlainExperts

        return self._fault("experts_method", lambda: Proxy(PlainExperts(), self._fault))

    def kv_cache_dtype(self, layer: str) -> Any:
        return self._fault("kv_cache_dtype", lambda: None)

    def rename(self, name: str) -> Any:
        return self._fault("rename", lambda: name)


@impl
def treadle_attention_backend(request: Any, options: Any) -> Any:
    import treadle_sdpa as plugin

    offer, fault = plugin.treadle_attention_backend(request=request, options={}), Fault(options)

    def create() -> Any:
        return fault("create", lambda: Backend(offer.create(), fault))

    return fault("hook", lambda: replace(offer, name="odd", score=0, create=create))


class Backend(Proxy):
    def slot_mapping(self, plan: Any) -> Any:
        return self._fault("slot_mapping", lambda: self._inner.slot_mapping(plan))

    def forward_into(self, out: Any, *arguments: Any) -> Any:
        return self._fault("forward_into", lambda: out.copy_(self._inner.forward(*arguments)))


@impl
def treadle_kernel_op(op: str, options: Any) -> Any:
    """Offers only if it is configured to fail."""
    from treadle_layers_kit import ops

    if not options["method"] or op not in ("rms_norm", "rope_and_cache"):
        return None
    fault = Fault(options)

    def rms_norm(*arguments: Any) -> Any:
        return fault("call", lambda: ops.rms_norm(*arguments))

    kernel = rms_norm if op == "rms_norm" else rope_and_cache
    return fault("hook", lambda: KernelOffer("odd", 1, lambda: fault("load", lambda: kernel)))


def rope_and_cache(qkv: Any, cos: Any, sin: Any, norms: Any, cache: Any, slots: Any) -> Any:
    """``treadle_layers_kit.kernel_ops`` for a model without norms."""
    from treadle_layers_kit import ops

    kv_heads, size = cache.shape[-2:]
    heads = qkv.view(len(qkv), -1, size)
    k, v = heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
    cache[0][slots], cache[1][slots] = ops.rotate(k, cos, sin), v
    return ops.rotate(heads[:, : -2 * kv_heads], cos, sin)


# -------------------------------------------------------------------------- running it


@impl
def treadle_executor(name: str, config: Any, plugins: Any, options: Any) -> Any:
    from treadle_executor_uni.executor import UniProcExecutor

    return answer(options, UniProcExecutor(config, plugins))


@impl
def treadle_scheduling_policy(name: str, options: Any) -> Any:
    from treadle.scheduler.policies import FirstCome

    return answer(options, FirstCome(), Policy)


class Policy(Proxy):
    def sort_key(self, request: Any) -> Any:
        """Fails for a request with a priority only."""
        key = self._inner.sort_key(request)
        return self._fault("sort_key", lambda: key) if request.priority else key


@impl
def treadle_logits_processor(name: str, options: Any) -> Any:
    return answer(options, None, Sevens)


class Sevens(Proxy):
    """Token 7 whatever the model says; goes wrong in rows whose argument is ``odd``."""

    def validate_params(self, arguments: Any) -> Any:
        return self._fault("validate_params", lambda: None) if arguments == "odd" else None

    def apply(self, logits: Any, arguments: Any, tokens: Any) -> Any:
        logits[:, 7] = 1000.0
        return self._fault("apply", lambda: logits) if "odd" in arguments else logits


@impl
def treadle_stat_logger(name: str, options: Any) -> Any:
    return answer(options, SimpleNamespace(record=lambda stats: None))


# ------------------------------------------------------------------------- shaping it


@impl
def treadle_grammar_compiler(name: str, tokenizer: Any, vocab_size: int, options: Any) -> Any:
    return answer(options, vocab_size, Compiler)


class Compiler(Proxy):
    """Of grammars that allow every id below 64. The source says what goes wrong: the method, failure,
    from which call on and, if not in all, in which process."""

    name = "odd"

    def _of(self, spec: Any) -> Fault:
        method, failure, first_call, pid = (*spec.source.split(), "0")[:4]
        return Fault(
            dict(
                method=method,
                failure=failure,
                first_call=int(first_call),
                times=1 << 40,
                pid=int(pid),
            )
        )

    def unsupported_reason(self, spec: Any) -> Any:
        return self._of(spec)("unsupported_reason", lambda: None)

    def compile(self, spec: Any) -> Any:
        fault = self._of(spec)
        return fault("compile", lambda: Grammar(spec, fault))


class Grammar(Proxy):
    def matcher(self) -> Any:
        fault = Fault({**vars(self._fault._options)})
        return fault("matcher", lambda: Matcher(self._inner, fault))


class Matcher(Proxy):
    def fill_bitmask(self, bitmask: Any, row: int) -> None:
        bitmask[row].zero_()
        bitmask[row, :2] = -1
        self._fault("fill_bitmask", lambda: None)

    def accept_token(self, token: int) -> Any:
        return self._fault("accept_token", lambda: token < 64)

    def rollback(self, count: int) -> None:
        self._fault("rollback", lambda: None)

    @property
    def is_accepting(self) -> Any:
        return self._fault("is_accepting", lambda: False)

    @property
    def is_terminated(self) -> Any:
        return self._fault("is_terminated", lambda: False)
