"""``LLM`` with vLLM's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import treadle
from treadle.errors import ConfigError, RequestError

from .outputs import RequestOutput, from_treadle
from .sampling_params import SamplingParams, to_treadle
from .sampling_params import from_treadle as params_from_treadle
from .v1.metrics.reader import Metric, read

__all__ = ("LLM", "refuse", "treadle_params")

Params = SamplingParams | Sequence[SamplingParams] | None

MISSING = {
    "beam_search": "beam search",
    "classify": "classification",
    "collective_rpc": "calls of functions in workers; write an executor plugin",
    "embed": "embedding",
    "encode": "embedding and pooling",
    "reset_prefix_cache": "dropping the prefix cache; `cache_salt` keeps prompts apart",
    "reward": "reward models",
    "score": "scoring",
    "sleep": "sleep mode",
    "start_profile": "profiling",
    "stop_profile": "profiling",
    "wake_up": "sleep mode",
}
"""Methods of vLLM's ``LLM`` for something that is not built yet."""


class LLM:
    """An engine inside the caller's process; every argument of vLLM's is accepted or answered.

    Raises ``ConfigError`` for an option that treadle does not have.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.engine = treadle.LLM(model, **{k: v for k, v in options.items() if v is not None})

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Params = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: Any = True,
        *,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete all prompts, in their order. ``prompt_token_ids`` are prompts of vLLM 0.8."""
        refuse("LLM.generate", others)
        if (prompts is None) == (prompt_token_ids is None):
            raise RequestError("give prompts or prompt_token_ids, one of them", param="prompts")
        inputs: Any = prompt_token_ids if prompts is None else prompts
        outputs = self.engine.generate(
            inputs,
            treadle_params(sampling_params),
            use_tqdm=bool(use_tqdm),
            priority=priority,
        )
        return [from_treadle(output) for output in outputs]

    def chat(
        self,
        messages: Any,
        sampling_params: Params = None,
        use_tqdm: Any = True,
        *,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them.

        A ``chat_template`` is refused: give it to ``LLM``. The format of contents is found in the
        template, whatever ``chat_template_content_format`` is.
        """
        if others.get("chat_template") is not None:
            raise RequestError(
                "chat_template of LLM.chat is not built yet; give it to LLM(chat_template=...)",
                param="chat_template",
            )
        refuse("LLM.chat", others)
        outputs = self.engine.chat(
            messages,
            treadle_params(sampling_params),
            bool(use_tqdm),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return [from_treadle(output) for output in outputs]

    def get_tokenizer(self) -> Any:
        return self.engine.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """Return what the engine has counted since it started."""
        return list(read(self.engine.stats))

    def get_default_sampling_params(self) -> SamplingParams:
        return params_from_treadle(self.engine.get_default_sampling_params())

    def __getattr__(self, name: str) -> Any:
        if name in MISSING:
            raise ConfigError(f"LLM.{name} is not built yet: {MISSING[name]}")
        raise AttributeError(f"LLM of treadle.compat.vllm has no attribute {name!r}")


def treadle_params(params: Params) -> Any:
    """Return one or several parameters as treadle's; ``None`` keeps the model's defaults."""
    if params is None:
        return None
    if isinstance(params, Sequence):
        return [to_treadle(p) for p in params]
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"sampling_params is {type(params).__name__}; it must be SamplingParams of "
            "treadle.compat.vllm or a list of them",
            param="sampling_params",
        )
    return to_treadle(params)


def refuse(method: str, others: Mapping[str, Any]) -> None:
    """Raise ``RequestError`` for arguments of vLLM that treadle cannot heed, unless they are unset."""
    for name, value in others.items():
        if value:
            raise RequestError(f"{name} of {method} is not built yet", param=name)
