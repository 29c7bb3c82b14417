"""What plugins build, as the engine uses it: a failure in there says whose it is.

Each class has the methods of the protocol that it stands for. Inside of a step, calls are not
counted one by one, only what they raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.api.attention import KernelOffer, Offer, PagedWriter
from treadle.api.files import ModelFiles, TensorFiles
from treadle.api.models import GatedMethod, ModelSpec, TensorNames
from treadle.errors import TreadleError
from treadle.plugins.call_stats import PASSED
from treadle.plugins.guard import Guard

if TYPE_CHECKING:
    from torch import Tensor, nn

    from treadle.api import types as t
    from treadle.plugins.host import Host
    from treadle.plugins.matching import Candidate

__all__ = ("Guarded",)


class Guarded:
    """The plugin host of an engine that starts: objects come with a guard."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def model_source(self, scheme: str) -> t.ModelSource:
        return _Source(self._host.model_source(scheme), self._guard("model_sources", scheme))

    def load_format(self, format: str, files: ModelFiles) -> t.WeightLoader:
        loader, guard = self._host.load_format(format, files), self._guard("load_formats", format)
        return (_NamingLoader if isinstance(loader, TensorFiles) else _Loader)(loader, guard)

    def tokenizer(self, mode: str, tokenizer: t.Tokenizer) -> t.Tokenizer:
        """``tokenizer``, which ``mode`` has opened, for texts of requests. Other plugins get the
        tokenizer itself, which may be able to do more than the protocol says."""
        return _Tokenizer(tokenizer, self._guard("tokenizers", mode))

    def renderer(self, mode: str, files: ModelFiles, tokenizer: t.Tokenizer) -> t.ChatRenderer:
        renderer = self._host.renderer(mode, files, tokenizer)
        return _Renderer(renderer, self._guard("renderers", mode))

    def model(self, architecture: str, hf_config: Any) -> ModelSpec:
        spec, guard = self._host.model(architecture, hf_config), self._guard("models", architecture)
        if not isinstance(spec, ModelSpec):
            guard.wrong("treadle_model", spec, "a ModelSpec")
        return replace(spec, build=lambda ctx: guard.call(spec, "build", ctx))

    def quantization(
        self, method: str, checkpoint: Mapping[str, Any], device: t.DeviceInfo
    ) -> t.QuantizationScheme:
        scheme = self._host.quantization(method, checkpoint, device)
        guard = self._guard("quantization", method)
        return (_RenamingScheme if isinstance(scheme, TensorNames) else _Scheme)(scheme, guard)

    def attention(self, request: t.AttentionRequest, pin: str | None = None) -> Offer:
        offer = self._host.attention(request, pin)
        guard = self._guard("attention", offer.name)

        def create() -> _Backend:
            backend = guard.call(offer, "create")
            return (_Writer if isinstance(backend, PagedWriter) else _Backend)(backend, guard)

        return replace(offer, create=create)

    def kernel(self, op: str, request: t.KernelRequest) -> KernelOffer | None:
        offer = self._host.kernel(op, request)
        if offer is None:
            return None
        guard = self._guard("kernels", offer.name)

        def load() -> Callable[..., Any]:
            kernel = guard.call(offer, "load")
            if not callable(kernel):
                guard.wrong("load", kernel, f"a function for {op}")
            return _kernel(kernel, op, guard)

        return replace(offer, load=load)

    def matches(self, kind: str, model: t.ModelTraits) -> list[Candidate]:
        return self._host.matches(kind, model)

    def options(self, kind: str, key: str) -> Mapping[str, Any]:
        return self._host.options(kind, key)

    def _guard(self, kind: str, key: str) -> Guard:
        return self._host.guard(kind, key)


def _kernel(kernel: Callable[..., Any], op: str, guard: Guard) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        try:
            found = kernel(*arguments)
        except PASSED:
            raise
        except BaseException as error:
            guard.fail(op, error)
        if found is None:
            guard.wrong(op, found, "a result")
        return found

    return call


class _Source:
    def __init__(self, source: t.ModelSource, guard: Guard) -> None:
        self._source, self._guard = source, guard

    def resolve(self, ref: t.ModelRef, *, patterns: Sequence[str]) -> ModelFiles:
        files = self._guard.call(self._source, "resolve", ref, patterns=patterns)
        if not isinstance(files, ModelFiles):
            self._guard.wrong("resolve", files, "ModelFiles")
        return files


class _Loader:
    def __init__(self, loader: t.WeightLoader, guard: Guard) -> None:
        self._loader, self._guard = loader, guard

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Only what happens inside of the loader is the loader's failure."""
        with self._guard.watching("tensors"):
            found = iter(self._loader.tensors(wanted))
        while True:
            try:
                name, tensor = self._next(found)
            except StopIteration:
                return
            yield name, tensor

    def _next(self, found: Iterator[Any]) -> tuple[str, Tensor]:
        try:
            name, tensor = next(found)
        except (StopIteration, TreadleError, *PASSED):
            raise
        except BaseException as error:
            self._guard.fail("tensors", error)
        if not isinstance(name, str) or not hasattr(tensor, "shape"):
            self._guard.wrong("tensors", (name, tensor), "the name of a tensor and the tensor")
        return name, tensor


class _NamingLoader(_Loader):
    def where(self, name: str) -> str:
        """Asked for an error's words, so that it must not raise one of its own."""
        try:
            return str(self._guard.call(self._loader, "where", name))
        except TreadleError as error:
            return f"a file whose name is not known ({error})"


def _ids(found: Any, guard: Guard) -> list[int]:
    if not isinstance(found, list) or not set(map(type, found)) <= {int}:
        guard.wrong("encode", found, "a list of ints")
    return found


class _Tokenizer:
    def __init__(self, tokenizer: t.Tokenizer, guard: Guard) -> None:
        self._tokenizer, self._guard = tokenizer, guard

    @property
    def vocab_size(self) -> int:
        with self._guard.watching("vocab_size"):
            return self._tokenizer.vocab_size

    @property
    def eos_id(self) -> int | None:
        with self._guard.watching("eos_id"):
            return self._tokenizer.eos_id

    @property
    def special_ids(self) -> frozenset[int]:
        with self._guard.watching("special_ids"):
            return frozenset(self._tokenizer.special_ids)

    @property
    def chat_template(self) -> str | None:
        with self._guard.watching("chat_template"):
            found = self._tokenizer.chat_template
            if found is not None and not isinstance(found, str):
                self._guard.wrong("chat_template", found, "a template, or None,")
            return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = self._guard.call(
            self._tokenizer, "encode", text, add_special_tokens=add_special_tokens
        )
        return _ids(ids, self._guard)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        found = self._guard.call(
            self._tokenizer, "decode", ids, skip_special_tokens=skip_special_tokens
        )
        return str(found)

    def token(self, token: int) -> str:
        return str(self._guard.call(self._tokenizer, "token", token))

    def token_bytes(self, token: int) -> bytes:
        try:
            found = self._tokenizer.token_bytes(token)
        except PASSED:
            raise
        except BaseException as error:
            self._guard.fail("token_bytes", error)
        if type(found) is not bytes:
            self._guard.wrong("token_bytes", found, "bytes")
        return found

    def stream(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> t.TextStream:
        stream = self._guard.call(
            self._tokenizer,
            "stream",
            prompt_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return _Stream(stream, self._guard)


class _Stream:
    def __init__(self, stream: t.TextStream, guard: Guard) -> None:
        self._stream, self._guard = stream, guard

    def step(self, token: int) -> str:
        try:
            text = self._stream.step(token)
        except PASSED:
            raise
        except BaseException as error:
            self._guard.fail("step", error)
        if type(text) is not str:
            self._guard.wrong("step", text, "a text")
        return text

    def finish(self) -> str:
        text = self._guard.call(self._stream, "finish")
        if not isinstance(text, str):
            self._guard.wrong("finish", text, "a text")
        return text


class _Renderer:
    def __init__(self, renderer: t.ChatRenderer, guard: Guard) -> None:
        self._renderer, self._guard = renderer, guard
        self.plugin = guard.entry.id

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        prompt = self._guard.call(self._renderer, "render", messages, **options)
        if not isinstance(prompt, str):
            self._guard.wrong("render", prompt, "a text")
        return prompt

    def encode(self, prompt: str) -> list[int]:
        return _ids(self._guard.call(self._renderer, "encode", prompt), self._guard)

    def close(self) -> None:
        """Release what it holds, if it can."""
        close = getattr(self._renderer, "close", None)
        if close is not None:
            close()


class _Scheme:
    def __init__(self, scheme: t.QuantizationScheme, guard: Guard) -> None:
        self._scheme, self._guard = scheme, guard
        self.name = str(getattr(scheme, "name", guard.entry.key))

    def linear(self, spec: t.LinearSpec) -> t.LinearMethod | None:
        method = self._guard.call(self._scheme, "linear", spec)
        kind = _GatedLinear if isinstance(method, GatedMethod) else _Linear
        return method if _own(method) else kind(method, self._guard)

    def experts(self, spec: t.ExpertsSpec) -> t.ExpertsMethod | None:
        method = self._guard.call(self._scheme, "experts", spec)
        return method if _own(method) else _Experts(method, self._guard)

    def kv_dtype(self, layer: str) -> str | None:
        found = self._guard.call(self._scheme, "kv_dtype", layer)
        if found is not None and not isinstance(found, str):
            self._guard.wrong("kv_dtype", found, "the name of a type, or None,")
        return found


class _RenamingScheme(_Scheme):
    def rename(self, name: str) -> str | None:
        try:
            found = self._scheme.rename(name)  # type: ignore[attr-defined]
        except (TreadleError, *PASSED):
            raise
        except BaseException as error:
            self._guard.fail("rename", error)
        if found is not None and not isinstance(found, str):
            self._guard.wrong("rename", found, "a name, or None,")
        return found


def _own(method: object) -> bool:
    """A layer that is left alone, or stored in a way of our own."""
    return method is None or type(method).__module__.startswith("treadle.layers.")


class _Linear:
    def __init__(self, method: t.LinearMethod, guard: Guard) -> None:
        self._method, self._guard = method, guard
        self._width = 0

    def create(self, module: nn.Module, spec: t.LinearSpec) -> None:
        self._width = sum(spec.out_features)
        self._guard.call(self._method, "create", module, spec)

    def finish(self, module: nn.Module) -> None:
        self._guard.call(self._method, "finish", module)

    def apply(self, module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._applied("apply", module, x, bias)

    def _applied(self, name: str, module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        try:
            y: Tensor = getattr(self._method, name)(module, x, bias)
            if y.shape[-1] == self._width:
                return y
        except PASSED:
            raise
        except BaseException as error:
            self._guard.fail(name, error)
        self._guard.wrong(name, y, f"a tensor whose last size is {self._width}")


class _GatedLinear(_Linear):
    def apply_gated(self, module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._applied("apply_gated", module, x, bias)


class _Experts:
    def __init__(self, method: t.ExpertsMethod, guard: Guard) -> None:
        self._method, self._guard = method, guard

    def create(self, module: nn.Module, spec: t.ExpertsSpec) -> None:
        self._guard.call(self._method, "create", module, spec)

    def finish(self, module: nn.Module) -> None:
        self._guard.call(self._method, "finish", module)

    def apply(
        self, module: nn.Module, x: Tensor, chosen: Tensor, op: Callable[[Tensor], Tensor]
    ) -> Tensor:
        try:
            y = self._method.apply(module, x, chosen, op)
            if y.shape == (*chosen.shape, x.shape[1]):
                return y
        except PASSED:
            raise
        except BaseException as error:
            self._guard.fail("apply", error)
        self._guard.wrong("apply", y, f"a tensor {[*chosen.shape, x.shape[1]]}")


class _Backend:
    def __init__(self, backend: t.AttentionBackend, guard: Guard) -> None:
        self._backend, self._guard = backend, guard

    def cache_shape(self, pages: int, page_size: int, spec: t.LayerCacheSpec) -> tuple[int, ...]:
        shape = self._guard.call(self._backend, "cache_shape", pages, page_size, spec)
        if not isinstance(shape, Sequence) or not all(isinstance(n, int) and n > 0 for n in shape):
            self._guard.wrong("cache_shape", shape, "a tuple of sizes")
        return tuple(shape)

    def plan(self, batch: t.AttentionBatch) -> Any:
        with self._guard.watching("plan", step=True):
            return self._backend.plan(batch)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: Tensor,
        plan: Any,
        *scales: tuple[float, float],
    ) -> Tensor:
        try:
            y = self._backend.forward(q, k, v, cache, plan, *scales)
            if y.shape == q.shape:
                return y
        except PASSED:
            raise
        except BaseException as error:
            self._guard.fail("forward", error)
        self._guard.wrong("forward", y, f"a tensor {list(q.shape)}")


class _Writer(_Backend):
    def slots(self, plan: Any) -> Tensor:
        try:
            slots: Tensor = self._backend.slots(plan)  # type: ignore[attr-defined]
        except PASSED:
            raise
        except BaseException as error:
            self._guard.fail("slots", error)
        return slots
