"""Bugs that the simulator must find, as edits of the real code: what each would do to a user."""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

__all__ = ("BUGS", "Bug")


@dataclass(frozen=True)
class Bug:
    """``old`` stands exactly once in the source of ``function`` (``module:Class.method``)."""

    function: str
    old: str
    new: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The function with the bug in place of the right one. Raises ``ValueError`` if the source
        has moved on."""
        module_name, _, path = self.function.partition(":")
        module = importlib.import_module(module_name)
        owner: Any = module
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        function = owner.__dict__[name]
        source = textwrap.dedent(inspect.getsource(getattr(function, "fget", function)))
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.function} has {self.old!r} {source.count(self.old)} times, not once; "
                "rewrite the planted bug for the code as it is"
            )
        flags = __future__.annotations.compiler_flag
        code = compile(source.replace(self.old, self.new), self.function, "exec", flags, True)
        namespace: dict[str, Any] = {}
        exec(code, vars(module), namespace)  # noqa: S102
        with patch.object(owner, name, namespace[name]):
            yield


CACHE = "treadle.cache.kv_cache_manager:KVCacheManager"
SCHEDULER = "treadle.scheduler.scheduler:Scheduler"
CORE = "treadle.engine.core:EngineCore"
CLIENT = "treadle.engine.client:EngineClient"
GRAMMARS = "treadle.structured_output.compile_queue:CompileQueue"
ASYNC = "treadle.entrypoints.async_llm:AsyncLLM"

BUGS = {
    "a page leaves the window one page too early": Bug(
        f"{CACHE}._first_page_in_window", "position - window + 1", "position - window + 1 + self.page_size"
    ),
    "a prefix hit covers the last token": Bug(
        f"{CACHE}.find_cached_prefix", "(len(tokens) - 1) // self.page_size", "len(tokens) // self.page_size"
    ),
    "siblings share a page that is not full": Bug(
        f"{SCHEDULER}._try_admit", "(sequence.num_prompt_tokens - 1) // cache.page_size",
        "-(-sequence.num_prompt_tokens // cache.page_size)",
    ),
    "the hash of a page leaves out those before it": Bug(
        "treadle.cache.page_hash:PageHasher.extend_hashes", "sha256(parent + content)", "sha256(root + content)"
    ),
    "the cache salt is ignored": Bug(
        "treadle.cache.page_hash:PageHasher.root_hash", '(salt or "")', '""'
    ),
    "a page that is evicted keeps its hash": Bug(
        "treadle.cache.page_pool:PagePool.allocate",
        "del self._page_of_hash[self._hash_of_page.pop(page)]",
        "pass",
    ),
    "a page that is not computed yet is cached": Bug(
        f"{SCHEDULER}._update_chunks", "step.num_computed_tokens[row] + step.num_scheduled_tokens[row]",
        "len(sequence.token_ids)",
    ),
    "a chunk begins one token too late": Bug(
        "treadle.scheduler.step:InFlightStep.add_chunk", "token_ids[start:end]", "token_ids[start + 1 : end + 1]"
    ),
    "a prompt takes the time of those who generate": Bug(
        f"{SCHEDULER}._schedule_prefill_chunk", "self.pace.max_tokens(step, start)", "budget"
    ),
    "a chunk takes no time from its step": Bug(
        "treadle.scheduler.step_pace:StepPace.add_chunk", "step.seconds_left -= self.seconds(chunk)", "pass"
    ),
    "a preempted sequence caches the pages it has lost": Bug(
        f"{SCHEDULER}._preempt", "step.preempted.add(victim)", "pass"
    ),
    "prompt logprobs are kept over a preemption": Bug(
        f"{SCHEDULER}._preempt", "victim.prompt_logprobs = []", "pass"
    ),
    "a preempted sequence is not queued again": Bug(
        f"{SCHEDULER}._preempt", "self.waiting.push(victim)", "pass"
    ),
    "a row in flight outlives its sequence": Bug(
        f"{SCHEDULER}._update_decodes", "if sequence.finished:", "if False:"
    ),
    "a bitmask is for another row": Bug(
        f"{SCHEDULER}.grammars", "enumerate(step.sequences)", "enumerate(step.sequences[::-1])"
    ),
    "the outputs of a request share their seed": Bug(
        f"{CORE}._seed", "request.index * 0x9E3779B97F4A7C15", "0"
    ),
    "a request that waits for a grammar cannot be aborted": Bug(
        f"{CORE}.abort_requests", "self._waiting_for_grammar.pop(sequence_id, None)", "None"
    ),
    "a slow grammar is not compiled anew": Bug(
        f"{GRAMMARS}._run_next", "self._push(self._slow, job)", "pass"
    ),
    "a grammar that was left is not compiled again": Bug(
        "treadle.structured_output.compile_queue:CompileJob.is_retryable", "return self.done()", "return False"
    ),
    "a grammar is left by all when one leaves": Bug(
        f"{GRAMMARS}.release", "if not job.num_waiting and", "if"
    ),
    "a grammar that fails is told to nobody": Bug(
        f"{CORE}._admit_compiled", "outputs.append(TokenOutput(name, [], \"error\", error=str(error), param=error.param))", "pass"
    ),
    "a failed step ends only one of its sequences": Bug(
        f"{SCHEDULER}.update_from_output", "if not s.finished]", "if not s.finished][:1]"
    ),
    "aborts take the requests beside them along": Bug(
        f"{CLIENT}._flush", "for part in _batches(requests):", "for part in () if request_ids else _batches(requests):"
    ),
    "a lost reply is waited for without end": Bug(
        f"{CLIENT}.ping", "asyncio.timeout(timeout)", "asyncio.timeout(None)"
    ),
    "the end of the connection is overlooked": Bug(
        f"{CLIENT}.connection_lost", "self._fail(_exit_reason(self._child), exc)", "pass"
    ),
    "an invalid message is overlooked": Bug(
        f"{CLIENT}.data_received", 'self._break("it sent an invalid message", error)', "pass"
    ),
    "half a frame is lost": Bug(
        "treadle.processes.framing:FrameDecoder.feed", "if start:\n        del buffer[:start]", "del buffer[:]"
    ),
    "what the socket did not take is lost": Bug(
        "treadle.engine.process:Channel._flush", "self._unsent[0] = piece[num_sent:]", "self._unsent.popleft()"
    ),
    "the death of the engine is told to one reader": Bug(
        f"{ASYNC}.on_engine_dead", "list(self._streams.items())", "list(self._streams.items())[:1]"
    ),
    "a stream that is closed still counts": Bug(
        f"{ASYNC}.submit", "self._sequences -= count", "pass"
    ),
    "a reader that leaves does not abort": Bug(
        f"{ASYNC}.submit", "self._client.abort(self._outputs.drop(request.id))", "self._outputs.drop(request.id)"
    ),
    "a shutdown during the start cancels the callers": Bug(
        f"{ASYNC}.start", "await asyncio.wait((self._starting,))", "await asyncio.shield(self._starting)"
    ),
    "a late request starts what was shut down": Bug(
        f"{ASYNC}.start", "self._client.fatal_error is not None", "False"
    ),
    "a slow reader loses deltas": Bug(
        "treadle.entrypoints.output_stream:OutputStream.put",
        "merge_deltas(waiting, output) if waiting is not None and self._delta else output", "output",
    ),
    "an aborted sequence stays in the queue": Bug(
        "treadle.scheduler.queue:WaitingQueue.discard", "self._size -= 1", "pass"
    ),
    "a stop string is looked for in each token alone": Bug(
        "treadle.text.stops:StopMatcher.feed", "self._state = state", "self._state = 0"
    ),
}  # fmt: skip
