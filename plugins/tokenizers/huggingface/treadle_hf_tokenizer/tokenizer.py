"""The ``auto`` tokenizer: ``tokenizer.json`` on the ``tokenizers`` library, nothing else imported.

Checkpoints without a ``tokenizer.json`` are converted by transformers, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from treadle.api.checkpoints import parse_json, read_text
from treadle.errors import CheckpointError, RequestError
from treadle_hf_tokenizer.conversion import convert_tokenizer
from treadle_hf_tokenizer.detokenizer import ByteDetokenizer, PieceDetokenizer
from treadle_hf_tokenizer.growth import text_growth
from treadle_hf_tokenizer.settings import TokenizerSettings
from treadle_hf_tokenizer.token_bound import TokenBound, token_bound
from treadle_hf_tokenizer.vocabulary import ByteTable, alphabet

if TYPE_CHECKING:
    from treadle.api.files import IncrementalDetokenizer, ModelFiles

__all__ = ("AutoTokenizer",)


class AutoTokenizer:
    """Text to ids and back for one checkpoint. Immutable after construction, safe in threads."""

    def __init__(self, backend: Backend, settings: TokenizerSettings | None = None) -> None:
        """Takes ``backend`` over: it is completed with what ``settings`` say.

        Raises ``CheckpointError`` if it multiplies text."""
        self.settings = settings or TokenizerSettings()
        self._backend = backend
        self._growth = text_growth(backend)
        _complete(backend, self.settings)
        added_tokens = backend.get_added_tokens_decoder()
        self.added_tokens: Mapping[str, int] = {t.content: i for i, t in added_tokens.items()}
        self._special = {i: t.content for i, t in added_tokens.items() if t.special}
        self._special_ids = frozenset(self._special)
        self._letters = byte_alphabet = alphabet(backend.decoder)
        self._table = None if byte_alphabet is None else ByteTable(byte_alphabet, self._token_text)

    @classmethod
    def open(cls, files: ModelFiles) -> AutoTokenizer:
        """Read the tokenizer of a checkpoint. Raises ``CheckpointError``."""
        name = "tokenizer.json"
        text = read_text(files.root, name)
        try:
            if text is None:
                text = convert_tokenizer(files.root)
            else:
                parse_json(text.encode())  # ``tokenizers`` lets a key come twice
            backend = Backend.from_str(text)
            return cls(backend, TokenizerSettings.read(files.root))
        except CheckpointError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"cannot read {files.root / name}: {error}") from error

    @cached_property
    def vocab_size(self) -> int:
        size = self._backend.get_vocab_size(with_added_tokens=False)
        if size and self._backend.id_to_token(size - 1) is None:  # the ids have holes
            size = max(self._backend.get_vocab(with_added_tokens=False).values(), default=-1) + 1
        return max(size, max(self.added_tokens.values(), default=-1) + 1)

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def bos_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """``{"eos_token": "</s>"}`` and so on, as chat templates read them."""
        return self.settings.special

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The checkpoint's templates by name; ``default`` and perhaps ``tool_use``."""
        return self.settings.templates

    @property
    def backend(self) -> Backend:
        """The underlying tokenizer, for compilers of grammars. It must not be changed."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._growth.check(text)
        # Unlike ``encode``, the calls for batches let other threads run meanwhile; the fast one
        # leaves out the positions of tokens, which nobody reads.
        (encoding,) = self._backend.encode_batch_fast(
            [_encodable(text)], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def min_num_tokens(self, text: str) -> int:
        """Return a number that the tokens of ``text`` cannot be fewer than; 0 if none is known."""
        return 0 if self._bound is None else self._bound.min_num_tokens(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token: int) -> str:
        if self._table is not None:
            return self._table[token].decode("utf-8", "replace")
        return self._backend.decode([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        if self._table is not None:
            return self._table[token]
        if token in self._special:
            return self._special[token].encode()
        # What this token adds after another one: with its space, or without its "##".
        anchor, before = self._anchor
        text = self._backend.decode([anchor, token], skip_special_tokens=False)
        return (
            text.removeprefix(before).encode() if anchor >= 0 else self.id_to_token(token).encode()
        )

    def create_detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalDetokenizer:
        if self._table is not None:  # such decoders put no spaces between tokens
            skipped = self._special_ids if skip_special_tokens else frozenset[int]()
            return ByteDetokenizer(self._table, skipped, prompt_ids)
        unspaced = {} if skip_special_tokens or spaces_between_special_tokens else self._special
        return PieceDetokenizer(self._backend, prompt_ids, skip_special_tokens, unspaced)

    def _id(self, name: str) -> int | None:
        text = self.settings.special.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _token_text(self, token: int) -> str | None:
        return self._backend.id_to_token(token)

    @cached_property
    def _bound(self) -> TokenBound | None:
        return token_bound(self._backend, self._letters)

    @cached_property
    def _anchor(self) -> tuple[int, str]:
        """Some ordinary word and its text; ``(-1, "")`` if the vocabulary has none."""
        for token in range(self.vocab_size):
            text = self._token_text(token)
            if text and text.isalpha() and token not in self._special:
                return token, self._backend.decode([token], skip_special_tokens=False)
        return -1, ""


def _encodable(text: str) -> str:
    """``text`` itself. Raises ``RequestError`` for half a surrogate pair, which no vocabulary has."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has half of a surrogate pair at character {error.start}, which is not a "
            "character; send valid Unicode",
            param="prompt",
        ) from error
    return text


def _complete(backend: Backend, settings: TokenizerSettings) -> None:
    """Make ``backend`` behave as the files beside it say, and let it never cut or pad."""
    backend.no_truncation()
    backend.no_padding()
    existing = {t.content for t in backend.get_added_tokens_decoder().values()}
    added_tokens: list[AddedToken] = []
    for _, entry in sorted(settings.added_tokens.items()):
        flags = {
            k: bool(entry[k])
            for k in ("single_word", "lstrip", "rstrip", "normalized")
            if k in entry
        }
        added_tokens.append(
            AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
        )
    for text in (*settings.special.values(), *settings.extra_special):
        added_tokens.append(AddedToken(text, special=True, normalized=False))
    for token in added_tokens:
        if token.content not in existing:
            existing.add(token.content)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
