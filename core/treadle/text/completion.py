"""One output while it grows: ids to text, stop strings, log probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.api.files import SupportsManyTokens
from treadle.api.requests import TokenOutput
from treadle.api.sampling_params import SamplingParams
from treadle.outputs import CompletionOutput, PositionLogprobs
from treadle.text.logprobs import LogprobText
from treadle.text.stops import StopMatcher, StopStrings

if TYPE_CHECKING:
    from treadle.api.files import IncrementalDetokenizer, Tokenizer

__all__ = ("CompletionState",)


class CompletionState:
    """The state of one of the ``n`` outputs of a request. Used by one thread.

    ``text``, ``token_ids`` and ``logprobs`` hold what was not taken yet: everything, or for deltas
    what came since the last ``take``. ``stopped`` says that a stop string ended it while the
    engine still runs it. A text that is only seen at its end is made from many tokens at a time.
    """

    def __init__(
        self,
        id: str,
        index: int,
        params: SamplingParams,
        prompt_ids: list[int],
        tokenizer: Tokenizer | None,
        stops: StopStrings | None,
        stop_ids: frozenset[int],
    ) -> None:
        self.id = id
        self.index = index
        self._kind = params.output_kind
        self._stop_ids = stop_ids
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._matcher = None if stops is None else StopMatcher(stops)
        self._stream: IncrementalDetokenizer | None = None
        self._decode_many: Callable[[list[int]], str] | None = None
        text_tokenizer = tokenizer if params.detokenize else None
        if text_tokenizer is not None:
            self._stream = stream = text_tokenizer.create_detokenizer(
                prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            if stops is None and self._kind == "final" and isinstance(stream, SupportsManyTokens):
                self._decode_many = stream.decode_many
        self._unread: list[int] = []
        self._pieces: list[str] = []
        self.num_tokens = 0
        self.token_ids: list[int] = []
        has_logprobs = params.logprobs is not None
        self._logprob_text = LogprobText(text_tokenizer) if has_logprobs else None
        self.logprobs: list[PositionLogprobs] | None = [] if has_logprobs else None
        self.cumulative_logprob: float | None = 0.0 if has_logprobs else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stopped = False
        self.error: str | None = None
        self.error_param: str | None = None

    def push(self, out: TokenOutput) -> None:
        """Take what one step added. Tokens behind the end of a stop string are dropped."""
        tokens = out.token_ids
        num_used = len(tokens)
        self.finish_reason = out.finish_reason
        self.stop_reason = out.stop_reason
        self.error, self.error_param = out.error, out.param
        self._unread += tokens
        if self.finish_reason is not None or self._decode_many is None:
            num_used -= self._detokenize()
        self.token_ids += tokens[:num_used]
        self.num_tokens += num_used
        if self._logprob_text is not None and out.logprobs:
            entries = out.logprobs[:num_used]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(
                entry.logprobs[0] for entry in entries
            )
            if self.logprobs is not None:
                self.logprobs += map(self._logprob_text.position, entries)

    def end(self, reason: str, error: str | None = None) -> None:
        """Finish from outside: ``abort`` or ``error``. What was held back is let go."""
        self.finish_reason = reason
        self.error = error
        self._detokenize()

    def fail(self, error: str) -> None:
        """Finish because this output cannot be made, though the engine goes on."""
        self.stopped = self.finish_reason is None
        self.finish_reason, self.error = "error", error

    def take(self) -> CompletionOutput:
        """What the user sees now. The lists are the user's own."""
        text = "".join(self._pieces)
        token_ids, logprobs = self.token_ids, self.logprobs
        if self._kind == "delta":
            self._pieces = []
            self.token_ids = []
            self.logprobs = None if logprobs is None else []
        elif self.finish_reason is None:
            self._pieces = [text]
            token_ids = token_ids.copy()
            logprobs = None if logprobs is None else logprobs.copy()
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            error_param=self.error_param,
        )

    def _detokenize(self) -> int:
        """Append the text of the unread tokens. Return how many of them do not belong to the output."""
        tokens, self._unread = self._unread, []
        stream, reason = self._stream, self.finish_reason
        if stream is None:
            return 0
        # The id that stops is part of the output's ids, but not of its text.
        shown = reason != "stop" or self._include_stop or self._stop_ids.isdisjoint(tokens[-1:])
        visible = tokens if shown else tokens[:-1]
        if self._decode_many is not None:
            self._pieces.append(self._decode_many(visible))
            visible = []
        for i, token in enumerate(visible, start=1):
            text, matched = stream.decode_next(token), None
            if text and self._matcher is not None and self.num_tokens + i > self._min_tokens:
                text, matched = self._matcher.feed(text), self._matcher.matched
            self._pieces.append(text)
            if matched is not None:
                self._stop(matched)
                return len(tokens) - i
        if reason is not None:  # the ids have ended: say what is held back
            text = stream.flush()
            if self._matcher is not None:
                text = self._matcher.feed(text)
                if self._matcher.matched is not None:
                    self._stop(self._matcher.matched)
                text += self._matcher.finish()
            self._pieces.append(text)
        return 0

    def _stop(self, matched: str) -> None:
        self.stopped = self.finish_reason is None
        self.finish_reason, self.stop_reason = "stop", matched
        if self._include_stop:
            self._pieces.append(matched)
