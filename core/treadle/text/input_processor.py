"""Turns prompts and parameters into checked engine requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import EngineInfo
from treadle.errors import RequestError
from treadle.text.output_processor import PreparedRequest
from treadle.text.prompts import Prompt
from treadle.text.request_checks import check_request, too_long, with_schema_text

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer
    from treadle.text.assets import FrontendAssets
    from treadle.text.chat import Conversation

__all__ = ("InputProcessor",)

NO_TOKENIZER = (
    "this model has no tokenizer (no tokenizer.json or other tokenizer file in its folder): send "
    "prompt_token_ids instead of text, or start the engine with tokenizer=<folder or name>"
)
# More characters than any real token has, for tokenizers that know no better.
CHARS_PER_TOKEN = 512


class InputProcessor:
    """Checks and encodes requests of one frontend. Safe in threads: encoding may run in a pool."""

    def __init__(self, info: EngineInfo, assets: FrontendAssets) -> None:
        self.info = info
        self.assets = assets
        self.tokenizer = assets.guarded_tokenizer
        self.renderer = assets.renderer
        self._numbers = itertools.count(1)

    def need_tokenizer(self, param: str = "prompt") -> Tokenizer:
        """The tokenizer. Raises ``RequestError`` if there is none."""
        if self.tokenizer is None:
            raise RequestError(NO_TOKENIZER, param=param)
        return self.tokenizer

    def render(self, chat: Conversation, *, tools: bool = True, must_fit: bool = False) -> Prompt:
        """Render and encode one conversation, without its tools if not ``tools``.

        With ``must_fit`` it is not encoded if it is known to be too long. Raises ``RequestError``.
        """
        if self.renderer is None:
            raise RequestError(f"this model cannot chat: {NO_TOKENIZER}", param="messages")
        if chat.add_generation_prompt and chat.continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other: one opens a "
                "new turn, the other leaves the last one open",
                param="continue_final_message",
            )
        text = self.renderer.render(
            chat.messages,
            tools=chat.tools if tools else None,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            template_arguments=chat.chat_template_kwargs,
        )
        self._check_size(text, "messages", must_fit)
        return Prompt(text=str(text), ids=self.renderer.encode(text), client=chat.client)

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt. Markers in its text are special tokens: the text is all the user's,
        so there is nobody whose markers would have to be kept apart."""
        if prompt.ids is not None:
            return prompt.ids
        return self.need_tokenizer().encode(
            prompt.text or "", add_special_tokens=prompt.add_special_tokens
        )

    def check_length(self, prompt: Prompt, params: SamplingParams | None) -> None:
        """Refuse a text that cannot fit before time is spent on encoding it.

        Raises ``ContextLengthError``.
        """
        if prompt.ids is None:
            truncates = getattr(params, "truncate_prompt_tokens", None) is not None
            self._check_size(prompt.text or "", "prompt", not truncates)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int | None = None,
    ) -> PreparedRequest:
        """Encode, complete and check one request. Raises ``RequestError``; nothing is registered."""
        params = with_schema_text(
            self._complete(self.assets.defaults if params is None else params, priority)
        )
        self.check_length(prompt, params)
        ids = self.encode(prompt)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        number = next(self._numbers)
        label = f"request-{number}" if request_id is None else _label(request_id)
        leader = EngineRequest(
            id=f"{number}",
            prompt_ids=ids,
            params=params,
            arrival_time=time.monotonic(),
            bad_words=self._bad_words(params.bad_words) if params.bad_words else [],
            client=prompt.client,
            label=label,
        )
        check_request(leader, self.info)
        siblings = [
            msgspec.structs.replace(
                leader, id=f"{number}.{index}", index=index, prefix_leader=leader.id
            )
            for index in range(1, params.n)
        ]
        return PreparedRequest(
            id=label,
            prompt=prompt.text,
            prompt_ids=ids,
            params=params,
            arrival_time=leader.arrival_time,
            sequences=[leader, *siblings],
        )

    def _complete(self, params: SamplingParams, priority: int | None) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params is {type(params).__name__}; it must be SamplingParams",
                param="sampling_params",
            )
        changes: dict[str, Any] = {}
        if priority is not None and priority != params.priority:
            changes["priority"] = priority
        if not self.assets.priorities and changes.get("priority", params.priority):
            raise RequestError(
                f"priority is {changes.get('priority', params.priority)}, but the scheduler serves "
                "first come, first served: leave it out, or start the engine with "
                "scheduling_policy=priority",
                param="priority",
            )
        # Without an output limit the engine takes the rest of the context.
        limit = self.assets.output_limit
        if params.max_tokens is None and limit is not None and not params.ignore_eos:
            changes["max_tokens"] = max(limit, params.min_tokens)
        if params.thinking_token_budget is not None:
            raise RequestError(
                "thinking_token_budget is for chats: send messages instead of a prompt, or leave it out",
                param="thinking_token_budget",
            )
        if params.stop_strings:
            self.need_tokenizer("stop")
        if params.bad_words:
            self.need_tokenizer("bad_words")
        return params.replace(**changes) if changes else params

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as it begins a text and as it follows a space: most vocabularies tell them apart."""
        tokenizer = self.need_tokenizer("bad_words")
        id_lists: list[list[int]] = []
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                ids = tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in id_lists:
                    id_lists.append(ids)
        return id_lists

    def _check_size(self, text: str, param: str, must_fit: bool) -> None:
        """Refuse a text that is too long, or with ``must_fit`` one that has too many tokens."""
        tokens, limit = -(-len(text) // CHARS_PER_TOKEN), self.info.max_model_len
        # An optional method: the fewest tokens that a text of this length can have.
        bound = getattr(self.tokenizer, "min_num_tokens", None)
        if must_fit and bound is not None:
            tokens = max(tokens, bound(text))
        if tokens > limit:
            length = f"the prompt has {len(text)} characters, which are at least {tokens} tokens"
            raise too_long(length, self.info, param)


def _label(request_id: str) -> str:
    """A client's id, which is shown and compared but never used as a key of the engine."""
    max_length = 128
    if not 0 < len(request_id) <= max_length or not request_id.isprintable():
        raise RequestError(
            f"request_id is {request_id!r:.160}; it must be 1 to {max_length} printable characters",
            param="request_id",
        )
    return request_id
