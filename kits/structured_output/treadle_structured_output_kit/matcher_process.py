"""llguidance in processes of their own: what is asked of them, and what they answer.

One process reads the vocabulary, and each of the others is a fork of it, which takes milliseconds and little
memory. Nothing there waits for the interpreter of the engine.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from treadle.processes.framing import receive_frame, send_frame
from treadle_structured_output_kit.bitmask import BitmaskRow, empty_row
from treadle_structured_output_kit.llguidance_vocabulary import MAX_TEXT, MAX_TEXTS

__all__ = (
    "ANSWER",
    "FAILED",
    "FORGET",
    "IS_COMPLETE",
    "NOBODY",
    "QUESTION",
    "Integers64",
    "MatcherRequest",
    "Setup",
    "main",
)

ANSWER, QUESTION = b"\0", b"\1"
"""The first byte of what a process sends. After ``QUESTION`` comes a text; it goes on once it has its ids, int32."""
FORGET = NOBODY = -1
FAILED, GOES_ON, IS_COMPLETE = range(3)
"""The answer for each matcher, one byte. Complete: a mask allows the end, a token leaves nothing else."""


Integers64 = np.ndarray[tuple[int], np.dtype[np.int64]]


class Setup(msgspec.Struct, array_like=True):
    """A vocabulary: the bytes of each token, the last of which is the end."""

    tokens: list[bytes]
    special_ids: list[int]


class MatcherRequest(msgspec.Struct, array_like=True):
    """What a process does, in the order of the fields. Numbers are those of matchers, keys those of grammars.

    A matcher of ``added`` has read some tokens already; the source of its grammar is there if the process does
    not have it. In place of a number, ``FORGET`` is for the grammar. ``texts`` are some whose ids another process has asked for. ``numbers``, ``tokens`` and
    ``rows`` are int32 in bytes. The first answer is for ``tokens``, the second for the masks, which go to
    ``rows``. What is empty is not asked for, and not answered.
    """

    dropped: list[int]
    added: list[tuple[int, int, str | None, list[int]]]
    texts: list[tuple[bytes, list[int]]]
    numbers: bytes
    tokens: bytes
    rows: bytes


class _Vocabulary:
    """The attributes that the library reads from a tokenizer. The engine knows the ids of a text."""

    bos_token_id = None

    def __init__(self, setup: Setup) -> None:
        self.tokens, self.special_token_ids = setup.tokens, setup.special_ids
        self.eos_token_id = len(setup.tokens) - 1
        self.sock: socket.socket | None = None
        self.ids: dict[bytes, list[int]] = {}

    def __call__(self, text: bytes) -> list[int]:
        ids = self.ids.get(text)
        if ids is None:
            if self.sock is None:  # the library tries its tokenizer when it is made
                return []
            send_frame(self.sock, QUESTION + text)
            ids = _integers(receive_frame(self.sock))
            self.learn(text, ids)
        return ids

    def learn(self, text: bytes, ids: list[int]) -> None:
        """Keep the ids of a text, if it may be one of many sequences."""
        if len(text) < MAX_TEXT:
            if len(self.ids) == MAX_TEXTS:
                self.ids.clear()
            self.ids[text] = ids


def main(fd: int) -> None:
    """The entry of the process that reads the vocabulary; ``fd`` is its end of a socket pair.

    It gets the vocabulary, then for each fork a socket, the memory of masks, and memory for the number of the
    matcher that the fork is about to call, an int64, ``NOBODY`` if none. With the engine it ends, and all of its
    forks, whatever they do.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forks: set[int] = set()

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):  # none is left
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                forks.discard(pid)

    signal.signal(signal.SIGCHLD, reap)
    with socket.socket(fileno=fd) as server, contextlib.suppress(ConnectionError):
        vocabulary = _Vocabulary(msgspec.msgpack.decode(receive_frame(server), type=Setup))
        size, end = len(vocabulary.tokens), vocabulary.eos_token_id
        tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=size, eos_token=end)
        send_frame(server, b"")
        while fds := socket.recv_fds(server, 1, 3)[1]:
            pid = os.fork()
            if not pid:
                server.close()
                _serve(socket.socket(fileno=fds[0]), fds[1], fds[2], vocabulary, tokenizer)
            forks.add(pid)
            for inherited in fds:
                os.close(inherited)
    for pid in list(forks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _serve(
    sock: socket.socket,
    masks_fd: int,
    current_fd: int,
    vocabulary: _Vocabulary,
    tokenizer: LLTokenizer,
) -> None:
    """Answer requests in a fork until the engine is gone, and leave without the end of an interpreter."""
    status = 1
    try:
        vocabulary.sock = sock
        masks, current = mmap.mmap(masks_fd, 0), np.frombuffer(mmap.mmap(current_fd, 0), np.int64)
        matchers = _Matchers(tokenizer, len(vocabulary.tokens), masks, current)
        decoder = msgspec.msgpack.Decoder(MatcherRequest)
        send_frame(sock, b"%d" % os.getpid())
        while True:
            request = decoder.decode(receive_frame(sock))
            matchers.update(request)
            for text, ids in request.texts:
                vocabulary.learn(text, ids)
            numbers = _integers(request.numbers)
            if request.tokens:
                accepted = bytes(map(matchers.accept, numbers, _integers(request.tokens)))
                current[0] = NOBODY
                send_frame(sock, ANSWER + accepted)
            if request.rows:
                filled = matchers.fill(numbers, _integers(request.rows))
                current[0] = NOBODY
                send_frame(sock, ANSWER + filled)
    except ConnectionError:
        status = 0
    except BaseException:  # a panic of a Rust library is no Exception
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _integers(data: bytes) -> list[int]:
    values: list[int] = np.frombuffer(data, np.int32).tolist()
    return values


class _Matcher:
    """A matcher, and the mask of its next token if that is known."""

    __slots__ = ("address", "has_mask", "library", "mask")

    def __init__(self, library: LLMatcher, mask: BitmaskRow) -> None:
        self.library, self.mask, self.has_mask = library, mask, False
        self.address = mask.ctypes.data


class _Matchers:
    """The matchers of one process."""

    def __init__(
        self, tokenizer: LLTokenizer, vocab_size: int, memory: mmap.mmap, current: Integers64
    ) -> None:
        self._tokenizer, self._vocab_size, self._current = tokenizer, vocab_size, current
        num_words = len(empty_row(vocab_size))
        self._masks = np.frombuffer(memory, np.uint32)
        self._masks = self._masks[: len(self._masks) // num_words * num_words]
        self._masks = self._masks.reshape(-1, num_words)
        self._grammars: dict[int, LLMatcher] = {}
        self._matchers: dict[int, _Matcher] = {}

    def update(self, request: MatcherRequest) -> None:
        """Drop, add and forget what a request says."""
        for number in request.dropped:
            self._matchers.pop(number, None)
        for number, key, source, tokens in request.added:
            if number == FORGET:
                del self._grammars[key]
                continue
            self._current[0] = number
            if source is not None:
                self._grammars[key] = LLMatcher(self._tokenizer, source, log_level=0)
            library = self._grammars[key].deep_copy()
            library.consume_tokens(tokens)
            self._matchers[number] = _Matcher(library, empty_row(self._vocab_size))

    def accept(self, number: int, token: int) -> int:
        """Advance a matcher by a token."""
        matcher, self._current[0] = self._matchers[number], number
        matcher.has_mask = False
        if not matcher.library.consume_token(token):
            return FAILED
        must_end = matcher.library.is_stopped() and matcher.library.is_accepting()
        return IS_COMPLETE if must_end else GOES_ON

    def fill(self, numbers: Sequence[int], rows: Sequence[int]) -> bytes:
        """Write masks to rows of the shared ones. Return a byte for each matcher."""
        results, last = bytearray(len(numbers)), []
        for index, number in enumerate(numbers):
            matcher, self._current[0] = self._matchers[number], number
            # Of a text without a choice the engine may have to be asked for the ids, which takes its time.
            if matcher.has_mask or not matcher.library.compute_ff_bytes():
                results[index] = self._fill(matcher, rows[index])
            else:
                last.append(index)
        for index in last:
            self._current[0] = numbers[index]
            results[index] = self._fill(self._matchers[numbers[index]], rows[index])
        return bytes(results)

    def _fill(self, matcher: _Matcher, row: int) -> int:
        if not matcher.has_mask:  # it is computed once, wherever it is written
            matcher.library.unsafe_compute_mask_ptr(matcher.address, matcher.mask.nbytes)
            matcher.has_mask = True
        self._masks[row] = matcher.mask
        if matcher.library.is_error():
            return FAILED
        return IS_COMPLETE if matcher.library.is_accepting() else GOES_ON
