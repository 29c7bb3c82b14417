"""What stands behind transformers' attention interface, and what a model asks of it.

A configuration does not say how a model calls its attention, so the model is asked: it runs once
on the meta device, where nothing is computed, and each call is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.attention import ForwardContext
from treadle.api.models import ModelContext
from treadle.errors import TreadleError
from treadle_layers_kit import Attention
from treadle_transformers.support import refusal

__all__ = ("IMPLEMENTATION", "Call", "PagedAttention", "Steps", "observe", "register")

IMPLEMENTATION = "treadle"
ATTENTION_ATTR = "treadle_attention_backend"
TOKENS = 3

# Arguments that say nothing about what attention computes; any other that is set is refused.
MEANINGLESS = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class Call:
    """How one attention layer of a model calls the interface, in sizes of the whole model."""

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    scale: float | None
    window: int | None
    softcap: float | None
    sinks: bool = False


@dataclass(slots=True)
class Steps:
    """The step that runs now, for all attention layers of one model."""

    current: ForwardContext


class PagedAttention(nn.Module):
    """One attention layer of a transformers model, over treadle's pages.

    Values of a smaller head size than queries and keys are cached with zeros behind them.
    """

    def __init__(self, ctx: ModelContext, prefix: str, call: Call, steps: Steps) -> None:
        super().__init__()
        self.attn = Attention(
            ctx,
            f"{prefix}.attn",
            call.heads,
            call.kv_heads,
            call.head_size,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        self._first_head = ctx.tp_group.rank * self.attn.request.num_heads
        if call.sinks:
            del self.attn.sinks  # the model has them, and hands them on with each call
        self.steps = steps
        self.padding = call.head_size - call.value_size
        request = self.attn.request
        self.planned = ((request.num_heads, call.head_size), (request.num_kv_heads, call.head_size))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """``[1, heads, tokens, size]`` thrice to ``[1, tokens, heads, value_size]``.

        ``sinks`` is ``[heads]``, of the whole model or of this rank. Raises ``UnsupportedModelError`` when this rank's heads are not those that were planned.
        """
        if self.padding:
            value = nn.functional.pad(value, (0, self.padding))
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        if (q.shape[1:], k.shape[1:]) != self.planned:
            raise refusal(
                self.attn.spec.layer,
                f"a layer called attention with heads {tuple(q.shape[1:])} and "
                f"{tuple(k.shape[1:])} where {self.planned} were planned",
            )
        if sinks is not None:
            heads = self.attn.request.num_heads
            first = self._first_head if len(sinks) > heads else 0
            self.attn.sinks = sinks[first : first + heads].float()
        out: Tensor = self.attn(q, k, v, self.steps.current).view(q.shape)
        return out[None, ..., : v.shape[-1] - self.padding]


def register() -> None:
    """Make our attention known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: whoever serves ``module`` answers."""
    served = getattr(module, ATTENTION_ATTR)
    if isinstance(served, Recorder):
        return served.record(module, query, key, value, attention_mask, options), None
    return served(query, key, value, options.get("s_aux")), None


def observe(model: Any, decoder: nn.Module, architecture: str) -> dict[str, Call]:
    """The attention layers of a model on the meta device, by their paths, in order.

    Raises ``UnsupportedModelError`` when the model asks for what paged attention cannot do.
    """
    recorder = Recorder(architecture, {id(m): name for name, m in model.named_modules()})
    with _record_attention(model, recorder), torch.no_grad(), torch.device("meta"):
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        try:
            decoder(input_ids=ids, position_ids=ids, use_cache=False)
        except TreadleError:
            raise
        except Exception as error:  # each family fails in its own way
            raise refusal(
                architecture, f"it does not run without a mask and a cache ({error})"
            ) from error
    recorder.check(model.config)
    return recorder.calls


@contextmanager
def _record_attention(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Let ``recorder`` serve all modules; experts, which look at values, pass theirs through."""
    modules = list(model.modules())
    experts = [m for m in modules if hasattr(m, "is_transposed") and hasattr(m, "has_gate")]
    for module in modules:
        object.__setattr__(module, ATTENTION_ATTR, recorder)
    for module in experts:
        object.__setattr__(module, "forward", lambda hidden_states, *_, **__: hidden_states)
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop(ATTENTION_ATTR)
        for module in experts:
            module.__dict__.pop("forward")


class Recorder:
    """Writes down each call of the attention interface."""

    def __init__(self, architecture: str, names: Mapping[int, str]) -> None:
        self.architecture, self.names = architecture, names
        self.calls: dict[str, Call] = {}
        self.types: dict[str, int] = {}

    def record(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Remember a call; the result has the shape that attention returns."""
        name = self.names[id(module)]
        heads, kv_heads = int(query.shape[1]), int(key.shape[1])
        size, value_size = int(query.shape[3]), int(value.shape[3])
        sinks = options.get("s_aux")
        for reason, is_unsupported in (
            ("a layer attends twice in one pass", name in self.calls),
            ("it makes an attention mask of its own", mask is not None),
            ("its attention is not causal", not _causal(module, options)),
            ("its attention sees more keys than tokens", key.shape[2] != TOKENS),
            ("its values are larger than its keys", value_size > size),
            ("its query heads do not share key heads equally", heads % kv_heads != 0),
            ("its keys and queries differ in size", key.shape[3] != size),
            ("its sinks are not one for each head", sinks is not None and sinks.shape != (heads,)),
        ):
            if is_unsupported:
                raise refusal(self.architecture, f"{reason} ({name})")
        self.calls[name] = Call(
            heads=heads,
            kv_heads=kv_heads,
            head_size=size,
            value_size=value_size,
            scale=options.get("scaling"),
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            sinks=sinks is not None,
        )
        supported = {"scaling", "sliding_window", "softcap", "s_aux", "is_causal", "dropout"}
        supported |= MEANINGLESS
        if extra := sorted(k for k, v in options.items() if v is not None and k not in supported):
            raise refusal(
                self.architecture,
                f"it calls attention with {', '.join(extra)}, which paged attention does not take",
            )
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            self.types[name] = index
        return query.new_empty(1, TOKENS, heads, value_size)

    def check(self, config: Any) -> None:
        """Every layer must attend, and slide where the configuration says so."""
        if len(self.calls) != config.num_hidden_layers:
            raise refusal(
                self.architecture,
                f"{len(self.calls)} attention layers use the interface, and the configuration has "
                f"{config.num_hidden_layers} layers",
            )
        types = getattr(config, "layer_types", None) or ()
        for name, index in self.types.items():
            slides = self.calls[name].window is not None
            if index < len(types) and slides != (types[index] == "sliding_attention"):
                raise refusal(
                    self.architecture,
                    f"the configuration says that {name} is {types[index]!r}, and its window is "
                    f"{self.calls[name].window}",
                )


def _causal(module: Any, options: Mapping[str, Any]) -> bool:
    is_causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
