"""Comparing a model plugin with transformers, over the attention reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.api.attention import ForwardContext
from treadle.api.checkpoints import files_in
from treadle.api.communicators import Communicator
from treadle.api.kinds import QUANTIZATION
from treadle.api.models import ExpertsSpec, LinearSpec
from treadle.api.plugin_kind import PluginKind
from treadle.plugins import PluginManager
from treadle.testing.attention_reference import ReferenceBackend, batch_of
from treadle_layers_kit import Attention, SingleRankCommunicator
from treadle_layers_kit.fusion import defer_all_reduce
from treadle_worker_kit.build import build_model
from treadle_worker_kit.model_config import max_model_len, read_config

__all__ = ("RecordingScheme", "TinyModel", "transformers_logits")

PAGE = 8


class TinyModel:
    """A checkpoint built by its plugin, whose attention layers use ``ReferenceBackend``.

    ``ids`` are always ``[tokens]`` of whole sequences from position 0; results are float32.
    """

    def __init__(
        self,
        folder: str | Path,
        plugins: PluginManager,
        *,
        tp_group: Communicator | None = None,
        dtype: torch.dtype = torch.float32,
        model_len: int | None = None,
        load_format: str = "auto",
        quantization: str = "auto",
    ) -> None:
        files = files_in(Path(folder), ["*"], str(folder))
        self.raw, self.config = read_config(files, plugins)
        self.model: Any
        self.model, self.spec = build_model(
            files,
            self.config,
            plugins,
            torch.device("cpu"),
            dtype,
            tp_group or SingleRankCommunicator(),
            lambda request, spec: ReferenceBackend(request),
            load_format=load_format,
            quantization=quantization,
            max_model_len=max_model_len(self.config, model_len),
        )
        defer_all_reduce(self.model)  # as the engine's start does; no kernels are offered
        self.attentions = [m for m in self.model.modules() if isinstance(m, Attention)]

    def logits(
        self, ids: Tensor, chunks: Sequence[int] = (), *, logits_indices: Tensor | None = None
    ) -> Tensor:
        """``[tokens, vocab]`` logits of one sequence, in steps of ``chunks`` tokens (or in one).

        With ``logits_indices``, the result of the model for these tokens, in one step.
        """
        if logits_indices is not None:
            self._clear([len(ids)])
            with torch.inference_mode():
                return self.step([ids], [0], [len(ids)], [len(ids)], logits_indices)
        return self.batch([ids], [list(chunks) or [len(ids)]])[0]

    def batch(self, sequences: Sequence[Tensor], chunks: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the logits of several sequences in one batch, each with its own chunks."""
        totals = [len(ids) for ids in sequences]
        self._clear(totals)
        outputs: list[list[Tensor]] = [[] for _ in sequences]
        num_computed = [0] * len(sequences)
        with torch.inference_mode():
            for chunk_index in range(max(len(c) for c in chunks)):
                counts = [c[chunk_index] if chunk_index < len(c) else 0 for c in chunks]
                rows = self.step(sequences, num_computed, counts, totals)
                for index, count in enumerate(counts):
                    num_computed[index] += count
                    outputs[index].append(rows[:count])
                    rows = rows[count:]
        return [torch.cat(parts) for parts in outputs]

    def _clear(self, totals: Sequence[int]) -> None:
        _, pages = batch_of(totals, totals, page_size=PAGE)
        for layer in self.attentions:
            layer.cache = torch.zeros(layer.backend.kv_cache_shape(pages, PAGE, layer.spec))

    def step(
        self,
        sequences: Sequence[Tensor],
        num_computed: Sequence[int],
        counts: Sequence[int],
        totals: Sequence[int],
        logits_indices: Tensor | None = None,
    ) -> Tensor:
        full_batch, _ = batch_of(totals, totals, page_size=PAGE)
        lengths = [d + n for d, n in zip(num_computed, counts, strict=True)]
        batch, _ = batch_of(counts, lengths, page_size=PAGE)
        batch.page_table = full_batch.page_table  # pages stay where they are between steps
        starts = full_batch.query_start_loc.tolist()
        spans = [(d, e) for d, e in zip(num_computed, lengths, strict=True)]
        batch.slot_mapping = torch.cat(
            [
                full_batch.slot_mapping[s + d : s + e]
                for s, (d, e) in zip(starts, spans, strict=False)
            ]
        )
        ids = torch.cat([q[d:e] for q, (d, e) in zip(sequences, spans, strict=True)])
        positions = torch.cat([torch.arange(d, e) for d, e in spans])
        hidden = self.model(
            ids, positions, ForwardContext(attn_metadata=[batch], logits_indices=logits_indices)
        )
        result: Tensor = self.model.compute_logits(hidden)
        return result.float()


class RecordingScheme:
    """A plugin manager of which the quantization leaves every layer as it is, and notes the ``names``
    of the matrices that it is called for."""

    def __init__(self, plugins: PluginManager) -> None:
        self._host = plugins
        self.name = "asked"
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def create_guarded(self, kind: PluginKind[Any], key: str, **arguments: Any) -> Any:
        if kind is QUANTIZATION:
            return self
        return self._host.create_guarded(kind, key, **arguments)

    def linear_method(self, spec: LinearSpec) -> None:
        self.names.update(spec.names)

    def experts_method(self, spec: ExpertsSpec) -> None:
        self.names.update(spec.names)

    def kv_cache_dtype(self, layer: str) -> None:
        """Nothing is said of caches."""


def transformers_logits(
    folder: str | Path, ids: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``[tokens, vocab]`` logits of transformers' own model for one sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        result: Tensor = model(ids[None]).logits[0]
    return result.float()
