"""Generators of the package ``outlines``, run by an ``LLM``: ``Generator(from_treadle(llm), output_type)``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outlines.models.vllm_offline import VLLMOffline, VLLMOfflineTypeAdapter

import treadle
from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.errors import RequestError
from treadle.outputs import RequestOutput

__all__ = ("TreadleModel", "from_treadle")


class TreadleModel(VLLMOffline):  # type: ignore[misc]  # without types here
    """A model of outlines whose outputs an ``LLM`` generates, with the engine's grammars.

    It is a ``VLLMOffline`` because outlines has a closed list of what a generator runs on. ``outlines.inputs.Chat``, and texts
    if the model has a chat template, are answered as chats. Keyword arguments of a generator are ``sampling_params``, or fields
    of ``SamplingParams``, such as ``max_tokens``.
    """

    def __init__(self, llm: treadle.LLM) -> None:
        self.model: Any = llm
        self.tokenizer: Any = llm.get_tokenizer()
        self.type_adapter = VLLMOfflineTypeAdapter(
            has_chat_template=self.tokenizer.chat_template is not None
        )

    def generate(self, model_input: Any, output_type: Any = None, **options: Any) -> Any:
        """Return the text of the output, or a list of texts if ``n`` is more than one."""
        (texts,) = self.generate_batch([model_input], output_type, **options)
        return texts if len(texts) > 1 else texts[0]

    def generate_batch(
        self, model_input: Sequence[Any], output_type: Any = None, **options: Any
    ) -> list[list[str]]:
        """Return the texts of the outputs of each input."""
        params = self._params(output_type, options)
        inputs = [self.type_adapter.format_input(item) for item in model_input]
        is_chat = [isinstance(item, list) for item in inputs]
        if any(is_chat) and not all(is_chat):
            raise RequestError("a batch has texts or chats, not both", param="messages")
        if not inputs:
            return []
        run = self.model.chat if all(is_chat) else self.model.generate
        outputs = run(inputs, params, use_tqdm=False)
        return [[completion.content for completion in output.outputs] for output in outputs]

    def generate_stream(
        self, model_input: Any, output_type: Any = None, **options: Any
    ) -> Iterator[str]:
        """Yield the text of the output in pieces."""
        params = self._params(output_type, options).replace(output_kind="delta")
        if params.n > 1:
            raise RequestError(f"n is {params.n}; a stream has one output", param="n")
        formatted = self.type_adapter.format_input(model_input)
        is_chat = isinstance(formatted, list)
        stream = self.model.stream_chat if is_chat else self.model.stream
        return _pieces(stream(formatted, params))

    def _params(self, output_type: Any, options: dict[str, Any]) -> SamplingParams:
        """Return the parameters with the constraint that outlines makes of a type."""
        given = options.pop("sampling_params", None)
        params: SamplingParams = given or self.model.get_default_sampling_params()
        constraint = self.type_adapter.format_output_type(output_type)
        if constraint:
            options["structured_outputs"] = StructuredOutputsParams(**constraint)
        unknown = sorted(options.keys() - set(SamplingParams.__struct_fields__))
        if unknown:
            raise RequestError(
                f"{unknown[0]} is no sampling parameter; give sampling_params or fields of "
                "treadle.SamplingParams",
                param=unknown[0],
            )
        return params.replace(**options) if options else params


def from_treadle(llm: treadle.LLM) -> TreadleModel:
    """Return a model for ``outlines.Generator``."""
    return TreadleModel(llm)


def _pieces(stream: Iterator[RequestOutput]) -> Iterator[str]:
    for output in stream:
        for completion in output.outputs:
            if completion.content:
                yield completion.content
