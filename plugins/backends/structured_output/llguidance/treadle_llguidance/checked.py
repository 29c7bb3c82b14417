"""A grammar, and checks of the values that it cannot hold."""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from treadle.api.types import Tokenizer
from treadle_structured_output_kit.bitmask import BitmaskRow, forbid_token, row_of
from treadle_structured_output_kit.llguidance import LLGuidanceGrammar, LLGuidanceMatcher
from treadle_structured_output_kit.value_checks import ValueChecks, ValueState

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("CheckedGrammar", "TokenTexts")


WHOLE = re.compile(rb'\[.*[\],]|".*"', re.DOTALL)
SPECIAL = re.compile(rb'["\\]')
FEW = 64
MAX_STEPS = 256
"""Texts that are tried to find one that is not in an array yet."""


class TokenTexts:
    """The bytes of all tokens, read when they are first needed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self.vocab_size = tokenizer, vocab_size

    @cached_property
    def of(self) -> list[bytes]:
        ids = range(min(self.vocab_size, self._tokenizer.vocab_size))
        return [self._tokenizer.token_bytes(token) for token in ids]

    @cached_property
    def has_quote(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """A mark for each id of a bitmask's words."""
        marks = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
        marks[[token for token, text in enumerate(self.of) if b'"' in text]] = 1
        return marks

    @cached_property
    def is_whole(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Which tokens may open a value and close it, or an item of it."""
        return np.array([WHOLE.search(text) is not None for text in self.of], dtype=np.uint8)

    @cached_property
    def _ids(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for token, text in enumerate(self.of):
            found.setdefault(text, []).append(token)
        return found

    def ids(self, text: bytes) -> list[int]:
        """Return the tokens with these bytes."""
        return self._ids.get(text, [])

    @cached_property
    def rank(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The place of each token among all, sorted by their bytes."""
        order = sorted(range(len(self.of)), key=self.of.__getitem__)
        ranks = np.zeros(len(order), dtype=np.int64)
        ranks[order] = np.arange(len(order))
        return ranks


class CheckedGrammar:
    """A ``CompiledGrammar`` whose masks leave out what would close a value that fails its check."""

    def __init__(self, grammar: LLGuidanceGrammar, checks: ValueChecks, texts: TokenTexts) -> None:
        self._grammar, self._checks, self._texts = grammar, checks, texts

    def matcher(self) -> _Matcher:
        return _Matcher(self._grammar.matcher(), self._checks, self._texts)


class _Matcher:
    def __init__(self, matcher: LLGuidanceMatcher, checks: ValueChecks, texts: TokenTexts) -> None:
        self._matcher, self._checks, self._texts = matcher, checks, texts
        self._text = bytearray()
        self._states = [(0, ValueState())]

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        self._matcher.fill_bitmask(bitmask, row)
        words = bitmask[row].numpy().view(np.uint32)
        forbidden = self._forbidden(words)
        if len(forbidden) < FEW:
            for token in forbidden:
                forbid_token(words, token)
        else:
            words &= ~row_of(forbidden, len(words) * 32)

    def accept_token(self, token: int) -> bool:
        state = self._after(self._bytes(token))
        if state is None or not self._matcher.accept_token(token):
            return False
        self._push(token, state)
        if self._is_dead():
            self.rollback(1)
            return False
        return True

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        del self._states[len(self._states) - count :]
        del self._text[self._states[-1][0] :]

    @property
    def is_accepting(self) -> bool:
        return self._matcher.is_accepting

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_terminated

    def _push(self, token: int, state: ValueState) -> None:
        self._text += self._bytes(token)
        self._states.append((len(self._text), state))

    def _bytes(self, token: int) -> bytes:
        texts = self._texts.of
        return texts[token] if token < len(texts) else b""

    def _step(self, state: ValueState) -> ValueState | None:
        """Return the state after the last byte of the text, ``None`` if a check fails."""
        try:
            return self._checks.advance(state, self._text, len(self._text) - 1)
        except (ValueError, IndexError):
            return None  # the grammar does not allow it either

    def _after(self, data: bytes) -> ValueState | None:
        """Return the state after ``data``, ``None`` if a check fails."""
        length, state = len(self._text), self._states[-1][1]
        try:
            for byte in data:
                self._text.append(byte)
                after = self._step(state)
                if after is None:
                    return None
                state = after
            return state
        finally:
            del self._text[length:]

    # ------------------------------------------------------------------------------ masks

    def _forbidden(self, words: BitmaskRow) -> list[int]:
        """Return the tokens that the grammar allows in ``words`` and a check does not."""
        tokens = self._candidates(words)
        texts = [self._texts.of[token] for token in tokens]
        length, states = len(self._text), [self._states[-1][1]]
        forbidden, doubtful, index = [], [], 0
        try:
            while index < len(tokens):
                data = texts[index]
                # Tokens are sorted: what this one shares with the one before is read already.
                shared = _num_shared(self._text[length:], data)
                del states[shared + 1 :], self._text[length + shared :]
                rest = data[shared:]
                if states[-1].is_plain:  # most of what goes on inside a text changes nothing
                    found = SPECIAL.search(rest)
                    plain = found.start() if found else len(rest)
                    self._text += rest[:plain]
                    states += [states[-1]] * plain
                    rest = rest[plain:]
                for byte in rest:
                    self._text.append(byte)
                    after = self._step(states[-1])
                    if after is None:
                        break
                    states.append(after)
                if len(states) > len(data):
                    if self._is_doubtful(states[-1]):
                        doubtful.append(tokens[index])
                    index += 1
                    continue
                end = _end_of(texts, index, bytes(self._text[length:]))
                del self._text[length + len(states) - 1 :]
                forbidden += tokens[index:end]
                index = end
        finally:
            del self._text[length:]
        return forbidden + [token for token in doubtful if self._leads_nowhere(token)]

    def _candidates(self, words: BitmaskRow) -> list[int]:
        """Return the tokens whose checks may fail, sorted by their bytes."""
        state = self._states[-1][1]
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(self._texts.of)]
        if not state.is_checked:  # only a token that also opens the value can close one
            allowed = allowed & self._texts.is_whole[: len(allowed)]
        elif state.mode in ("string", "name") and not state.is_followed:
            # Inside a text only its end closes a value, unless it is known what the text may be.
            marks = self._texts.has_quote[: len(allowed)].copy()
            for rest in self._rests(state):
                marks[[i for n in range(len(rest)) for i in self._texts.ids(rest[: n + 1])]] = 1
            allowed = allowed & marks
        found = np.flatnonzero(allowed)
        return list(map(int, found[np.argsort(self._texts.rank[found], kind="stable")]))

    # --------------------------------------------------------- texts that are there already

    def _rests(self, state: ValueState) -> list[bytes]:
        """Return how what is open would go on to become an item that is there already."""
        if not state.is_unique:
            return []
        begun = b"" if state.mode == "value" else bytes(self._text[state.start :])
        return [text[len(begun) :] for text in state.seen if text.startswith(begun)]

    def _is_doubtful(self, state: ValueState) -> bool:
        return bool(self._rests(state))

    def _leads_nowhere(self, token: int) -> bool:
        state = self._after(self._bytes(token))
        if state is None or not self._matcher.accept_token(token):
            return True
        self._push(token, state)
        try:
            return self._is_dead()
        finally:
            self.rollback(1)

    def _is_dead(self, steps: list[int] | None = None) -> bool:
        """Whether what is open, or comes next, can only become an item that is there already."""
        if not self._is_doubtful(self._states[-1][1]):
            return False
        import torch  # not above: processes that compile grammars come by here without it

        steps = [MAX_STEPS] if steps is None else steps
        bitmask = torch.zeros((1, -(-self._texts.vocab_size // 32)), dtype=torch.int32)
        self._matcher.fill_bitmask(bitmask, 0)
        bits = np.unpackbits(bitmask.numpy().view(np.uint8)[0], bitorder="little")
        for token in map(int, np.flatnonzero(bits[: len(self._texts.of)])):
            data = self._bytes(token)
            after = self._after(data)
            if after is None or (after.mode == "value" and not data.strip()):
                continue  # blanks lead where they come from
            self._push(token, after)
            is_doubtful = self._is_doubtful(after)
            del self._states[-1]
            del self._text[self._states[-1][0] :]
            steps[0] -= 1
            if not is_doubtful or steps[0] < 0 or not self._matcher.accept_token(token):
                return False
            self._push(token, after)
            is_dead = self._is_dead(steps)
            self.rollback(1)
            if not is_dead:
                return False
        return True


def _num_shared(first: bytes | bytearray, second: bytes) -> int:
    """Return how many bytes two texts have in common at their beginnings."""
    size = min(len(first), len(second))
    return next((i for i in range(size) if first[i] != second[i]), size)


def _end_of(texts: list[bytes], index: int, beginning: bytes) -> int:
    """Return where the sorted texts end that have this beginning, as ``texts[index]`` has."""
    stem = beginning.rstrip(b"\xff")
    if not stem:
        return len(texts)
    return bisect_left(texts, stem[:-1] + bytes([stem[-1] + 1]), index)
