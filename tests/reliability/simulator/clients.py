"""A client: it runs a request as its plan says, and compares what it gets with what it gets alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulator.model import LETTERS, Expected, expected, logprobs_of, prompt_logprob
from simulator.model import cell as cell_of
from simulator.plans import Plan
from treadle.errors import EngineDeadError, QueueFullError, RequestError, TreadleError
from treadle.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from simulator.episode import Episode

__all__ = ("Client",)


@dataclass
class Received:
    """One of the outputs of a request, as far as it has come."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    end: CompletionOutput | None = None


class Client:
    """Runs one plan. ``outcome`` is set when it is over, exactly once."""

    def __init__(self, episode: Episode, plan: Plan) -> None:
        self.episode, self.plan = episode, plan
        self.world = episode.world
        self.received = [Received() for _ in range(plan.params.n)]
        self.prompt_logprobs: Any = None
        self.outcome: str | None = None
        self.ended_at = 0.0
        self.is_finished = False
        self.is_cancelled = False
        self.is_aborted = False

    # -- what it does --------------------------------------------------------------------

    async def run(self) -> None:
        plan = self.plan
        await asyncio.sleep(plan.arrival)
        task = asyncio.current_task()
        if plan.cancel_after is not None and task is not None:
            asyncio.get_running_loop().call_later(plan.cancel_after, self._cancel, task)
        if plan.abort_after is not None:
            asyncio.get_running_loop().call_later(plan.abort_after, self._abort)
        try:
            await (self._in_halves() if plan.in_halves else self._generate())
            outcome = "finished" if self.is_finished else "left"
        except asyncio.CancelledError:
            if not self.is_cancelled:
                self._fail("it was cancelled by nobody")
            outcome = "cancelled"
        except TreadleError as error:
            self._check_error(error)
            outcome = type(error).__name__
        if self.outcome is not None:
            self._fail("it has ended twice")
        self.outcome, self.ended_at = outcome, self.world.now
        self._check_end()
        self.world.log("client", plan.number, outcome, *(len(r.tokens) for r in self.received))

    def _cancel(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            self.is_cancelled = True
            task.cancel()

    def _abort(self) -> None:
        if self.plan.request_id is not None and self.outcome is None:
            self.is_aborted = True
            self.episode.aborted_ids.add(self.plan.request_id)
            self.episode.llm.abort(self.plan.request_id)

    async def _generate(self) -> None:
        plan = self.plan
        outputs = self.episode.llm.generate(
            plan.prompt, plan.params, request_id=plan.request_id, priority=plan.priority
        )
        count = 0
        async for output in outputs:
            self._take(output)
            count += 1
            if plan.leave_after is not None and count > plan.leave_after:
                return  # the generator is dropped, and closed by the loop
            if plan.pause:
                await asyncio.sleep(plan.pause)

    async def _in_halves(self) -> None:
        plan, llm = self.plan, self.episode.llm
        prepared = await llm.prepare(
            plan.prompt, plan.params, request_id=plan.request_id, priority=plan.priority
        )
        stream = llm.submit(prepared)
        try:
            count = 0
            async for output in stream:
                self._take(output)
                count += 1
                if plan.leave_after is not None and count > plan.leave_after:
                    return
                if plan.pause:
                    await asyncio.sleep(plan.pause)
        finally:
            await stream.aclose()

    # -- what it checks ------------------------------------------------------------------

    def _fail(self, message: str) -> None:
        self.world.fail(f"client {self.plan.number}: {message}; its plan: {self.plan}")

    def _take(self, output: RequestOutput) -> None:
        if self.is_finished:
            self._fail("an output follows the last one")
        is_delta = self.plan.params.output_kind == "delta"
        for part in output.outputs:
            mine = self.received[part.index]
            if mine.end is not None and is_delta:
                self._fail(f"output {part.index} goes on after its end")
            if is_delta:
                mine.tokens = mine.tokens + part.token_ids
                mine.text += part.text
                mine.logprobs = mine.logprobs + (part.logprobs or [])
            else:
                if part.token_ids[: len(mine.tokens)] != mine.tokens:
                    self._fail(f"output {part.index} has lost tokens")
                mine.tokens, mine.text = part.token_ids, part.text
                mine.logprobs = part.logprobs or []
            mine.end = part if part.finish_reason is not None else mine.end
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.is_finished = output.finished
        if output.finished != all(mine.end is not None for mine in self.received):
            self._fail(f"finished is {output.finished}, but its outputs say otherwise")

    def _check_error(self, error: TreadleError) -> None:
        """Only what was injected, or what the plan deserves, may go wrong."""
        episode, text = self.episode, str(error)
        if isinstance(error, EngineDeadError):
            allowed = episode.is_engine_lost
        elif isinstance(error, QueueFullError):
            setup = episode.setup
            limit = setup.max_num_queued_reqs
            if "grammars wait" in text:
                limit = setup.max_num_queued_grammars
            allowed = limit < episode.num_sequences
        elif isinstance(error, RequestError):
            grammar = self.plan.grammar
            allowed = "belongs to a request" in text and episode.num_with_id(self.plan) > 1
            if error.param == "structured_outputs":
                allowed = grammar in ("refused", "wrong", "endless")
                if "could not be compiled" in text:
                    allowed |= self._source() in self.world.grammar_faults
        else:
            allowed = episode.setup.fails_to_start and "damaged" in text
        if not allowed:
            self._fail(f"it got {error!r}, which nobody has caused")

    def _source(self) -> str | None:
        grammar = self.plan.params.structured_outputs
        return None if grammar is None else grammar.regex

    def _check_end(self) -> None:
        for index, mine in enumerate(self.received):
            if not mine.tokens and mine.end is None:
                continue
            alone = expected(
                self.plan.prompt_ids, self.plan.params, index,
                self.episode.setup.windows, self.episode.setup.max_model_len,
            )  # fmt: skip
            self._check_output(index, mine, alone)

    def _check_output(self, index: int, mine: Received, alone: Expected) -> None:
        end = mine.end
        name = f"output {index}"
        if mine.tokens != alone.tokens[: len(mine.tokens)]:
            self._fail(f"{name} is {mine.tokens}; alone it is {alone.tokens}")
        # A stop string that is not complete is held back until the end.
        if not _may_follow(mine.text, alone.text):
            self._fail(f"{name} has the text {mine.text!r}; alone it is {alone.text!r}")
        self._check_logprobs(name, mine, alone)
        if self.plan.params.prompt_logprobs is not None and mine.tokens:
            self._check_prompt_logprobs()
        if end is not None:
            self._check_end_of(name, mine, end, alone)

    def _check_end_of(
        self, name: str, mine: Received, end: CompletionOutput, alone: Expected
    ) -> None:
        reason = end.finish_reason
        if reason in ("stop", "length"):
            got = (mine.tokens, mine.text, reason, end.stop_reason)
            want = (alone.tokens, alone.text, alone.finish_reason, alone.stop_reason)
            if got != want:
                self._fail(f"{name} is {got}; alone it is {want}")
        elif reason == "abort":
            if not (self.is_aborted or self.episode.is_shut or self._is_aborted_by_name()):
                self._fail(f"{name} was aborted by nobody")
        elif reason == "error":
            text = end.error or ""
            caused = "injected" in text or (self.plan.grammar == "stuck" and "stuck" in text)
            if not caused:
                self._fail(f"{name} ended with the error {text!r}, which nobody has caused")

    def _check_logprobs(self, name: str, mine: Received, alone: Expected) -> None:
        for position, entry in enumerate(mine.logprobs):
            count = self.plan.params.logprobs or 0
            value = logprobs_of(alone.values[position], alone.tokens[position], count)
            first = entry[value.ids[0]]
            if (first.logprob, first.rank) != (value.logprobs[0], value.rank):
                self._fail(f"{name} has the logprobs of another token at {position}")
        if self.plan.params.logprobs is not None and len(mine.logprobs) != len(mine.tokens):
            self._fail(f"{name} has {len(mine.logprobs)} logprobs for {len(mine.tokens)} tokens")

    def _is_aborted_by_name(self) -> bool:
        return self.plan.request_id in self.episode.aborted_ids

    def _check_prompt_logprobs(self) -> None:
        prompt, salt = self.plan.prompt_ids, self.plan.params.cache_salt
        if self.prompt_logprobs is None or len(self.prompt_logprobs) != len(prompt):
            count = None if self.prompt_logprobs is None else len(self.prompt_logprobs)
            self._fail(f"it has {count} prompt logprobs for {len(prompt)} tokens")
        for position, entry in enumerate(self.prompt_logprobs[1:]):
            value = prompt_logprob(cell_of(prompt[position], position, salt), prompt[position + 1])
            first = entry[value.ids[0]]
            if (first.logprob, first.rank) != (value.logprobs[0], value.rank):
                self._fail(f"it has a wrong prompt logprob at {position}")


def _may_follow(text: str, whole: str) -> bool:
    """Whether ``text`` may be what is known of ``whole``: its beginning, or with an end that a later
    stop string would have cut off."""
    return whole.startswith(text) or (text.startswith(whole) and set(text) <= set(LETTERS))
