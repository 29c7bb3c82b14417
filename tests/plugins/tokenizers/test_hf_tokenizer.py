"""The tokenizer equals transformers', and a stream says what decoding at once says."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import vocabularies
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from treadle_hf_tokenizer.tokenizer import AutoTokenizer

from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError, RequestError

TOKENIZERS = {name: AutoTokenizer(make()) for name, make in vocabularies.FAMILIES.items()}
FALLBACK = ("sentence_piece", "gemma")  # their decoders treat invalid bytes by whole runs
TEXTS = [
    "Hello world the test",
    "café 日本語 😀 x",
    " lead  two",
    "the\n\n the",
    "",
    " ",
    "<|im_end|> <tool_call>",
]


def streamed(
    tokenizer: AutoTokenizer, ids: list[int], prompt: Sequence[int] = (), **options: Any
) -> list[str]:
    stream = tokenizer.create_detokenizer(prompt, **options)
    return [*(stream.decode_next(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_a_stream_concatenates_to_the_decoded_text(name: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(streamed(tokenizer, ids, skip_special_tokens=skip)) == expected


@pytest.mark.parametrize("name", [n for n in TOKENIZERS if n not in FALLBACK])
def test_a_stream_of_random_ids_concatenates_to_the_decoded_text(name: str) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(name)
    for _ in range(1500):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        for skip in (True, False):
            expected = tokenizer.decode(ids, skip_special_tokens=skip)
            assert "".join(streamed(tokenizer, ids, skip_special_tokens=skip)) == expected, ids


@pytest.mark.parametrize("name", FALLBACK)
def test_byte_tokens_that_are_characters_come_out_as_such(name: str) -> None:
    """An invalid byte spoils a whole run when decoded at once, which nobody can foresee while
    streaming: there, bytes count one by one. On valid runs both agree."""
    tokenizer, rng = TOKENIZERS[name], random.Random(name)
    bytes_of = {b: tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in range(256)}
    plain = [tokenizer.backend.token_to_id(t) for t in ("the", "▁the", "▁", "é", "x", "</s>")]
    for _ in range(1000):
        ids: list[int] = []
        for _ in range(rng.randrange(6)):
            ids += rng.choice(
                [[rng.choice(plain)], [bytes_of[b] for b in rng.choice("é😀a 語").encode()]]
            )
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids), ids
    broken = [bytes_of[0xE6], bytes_of[0x97], plain[0], bytes_of[0xF0]]
    assert "".join(streamed(tokenizer, broken)).replace("\ufffd", "?") == "?the?"


@given(st.text(max_size=20), st.sampled_from(["byte_level", "gemma"]))
def test_no_step_ever_shows_half_a_character(text: str, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = streamed(tokenizer, tokenizer.encode(text))
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_text_leaves_as_soon_as_it_is_whole() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [tokenizer.backend.token_to_id(c) for c in "ðŁĺĢ"]  # the four bytes of one emoji
    assert streamed(tokenizer, ids) == ["", "", "", "😀", ""]
    assert streamed(tokenizer, ids[:3]) == ["", "", "", "\ufffd"]


def test_the_first_token_continues_the_prompt() -> None:
    llama = TOKENIZERS["sentence_piece"]
    the = llama.backend.token_to_id("▁the")
    prompt = llama.encode("He")
    assert streamed(llama, [the], prompt) == [" the", ""], "a space between prompt and output stays"
    assert streamed(llama, [the], [1]) == ["the", ""], "after nothing but <s> there is no space"
    bert = TOKENIZERS["word_piece"]
    hello, world = bert.encode("Hello")[0], bert.encode("world")
    assert "".join(streamed(bert, world, [hello])) == " world"


@pytest.mark.parametrize("name", ["byte_level", "sentence_piece", "word_piece", "words"])
def test_the_prompt_never_comes_out_again(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("Hello 日本語 the world")
    expected = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        before = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        assert before + "".join(streamed(tokenizer, ids[cut:], ids[:cut])) == expected


def test_a_character_that_the_prompt_began_is_finished() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [tokenizer.backend.token_to_id(c) for c in "ðŁĺĢ"]
    assert "".join(streamed(tokenizer, ids[2:], ids[:2])) == "😀"


def test_endless_invalid_bytes_take_linear_time() -> None:
    for name in ("byte_level", "sentence_piece"):
        tokenizer = TOKENIZERS[name]
        lead = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
        stream = tokenizer.create_detokenizer()
        pieces = [stream.decode_next(lead) for _ in range(20_000)]
        assert "".join(pieces) + stream.flush() == "\ufffd" * 20_000


def test_special_tokens_without_spaces_between() -> None:
    tokenizer = TOKENIZERS["words"]
    ids = [1, 4, 4, 2]
    assert "".join(streamed(tokenizer, ids, skip_special_tokens=False)) == "hello <end> <end> world"
    glued = streamed(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(glued) == "hello <end><end> world"
    assert "".join(streamed(tokenizer, ids)) == "hello world"


# ------------------------------------------------------------------ bytes of tokens


def test_bytes_of_tokens() -> None:
    byte_level = TOKENIZERS["byte_level"]
    ids = byte_level.encode("Hello 日本語 😀")
    assert b"".join(map(byte_level.token_bytes, ids)).decode() == "Hello 日本語 😀"
    assert byte_level.token_bytes(byte_level.backend.token_to_id("ð")) == b"\xf0"
    assert byte_level.id_to_token(byte_level.backend.token_to_id("ð")) == "\ufffd"
    assert byte_level.token_bytes(2) == b"<|im_end|>"
    assert byte_level.token_bytes(10**6) == b""

    llama = TOKENIZERS["sentence_piece"]
    assert llama.token_bytes(llama.backend.token_to_id("▁the")) == b" the"
    assert llama.token_bytes(llama.backend.token_to_id("<0xE6>")) == b"\xe6"

    bert = TOKENIZERS["word_piece"]
    pieces = [bert.backend.id_to_token(i) for i in range(bert.vocab_size)]
    tail = next(i for i, p in enumerate(pieces) if p.startswith("##") and p[2:].isalpha())
    assert bert.token_bytes(tail).decode() == pieces[tail][2:]
    assert TOKENIZERS["words"].token_bytes(2) == b" world"


# ------------------------------------------------------------------ files


def loaded(folder: Path) -> AutoTokenizer:
    return AutoTokenizer.open(ModelFiles(folder, (), {}))


@pytest.mark.parametrize("make", [vocabularies.byte_level, vocabularies.sentence_piece])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": False},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
        {"bos_token": "<s>", "add_bos_token": False},
        {"extra_special_tokens": ["<extra>", "<other>"], "pad_token": "<pad>"},
        {"additional_special_tokens": ["<extra>"]},
    ],
)
def test_encoding_equals_transformers(make: Any, config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer as Theirs

    vocabularies.save(make(), tmp_path, config)
    actual, reference = loaded(tmp_path), Theirs.from_pretrained(str(tmp_path))
    for text in [*TEXTS, "<extra> <pad></s><other>"]:
        for special in (True, False):
            assert actual.encode(text, add_special_tokens=special) == reference.encode(
                text, add_special_tokens=special
            )
        ids = actual.encode(text)
        assert actual.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert actual.eos_token_id == reference.eos_token_id
    assert actual.bos_id == reference.bos_token_id
    assert actual.vocab_size == len(reference)
    assert actual.special_token_ids == {
        i for i, t in reference.added_tokens_decoder.items() if t.special
    }


def test_added_tokens_of_the_configuration(tmp_path: Path) -> None:
    from transformers import AutoTokenizer as Theirs

    tok = vocabularies.byte_level()
    size = tok.get_vocab_size()
    added = {
        str(size): {"content": "<new>", "special": False, "normalized": False},
        str(size + 1): {"content": "<mark>", "special": True, "lstrip": True},
    }
    vocabularies.save(tok, tmp_path, {"added_tokens_decoder": added})
    actual, reference = loaded(tmp_path), Theirs.from_pretrained(str(tmp_path))
    ids = actual.encode("x <new> y <mark> z")
    assert ids == reference.encode("x <new> y <mark> z")
    assert (
        {size, size + 1} <= set(ids)
        and size + 1 in actual.special_token_ids
        and size not in actual.special_token_ids
    )


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tok = vocabularies.byte_level()
    tok.enable_truncation(4)
    tok.enable_padding(length=64)
    actual = loaded(vocabularies.save(tok, tmp_path))
    assert (
        actual.decode(actual.encode("Hello world, this is a test")) == "Hello world, this is a test"
    )


def test_damaged_files_are_named(tmp_path: Path) -> None:
    vocabularies.save(vocabularies.words(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        loaded(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an object"):
        loaded(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"x": {"content": "y"}}})
    )
    with pytest.raises(CheckpointError, match="no id"):
        loaded(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        loaded(tmp_path)


@pytest.mark.parametrize("part", ['"model": {', '"vocab": {', '"added_tokens": [{'])
def test_a_key_that_comes_twice_is_an_error(tmp_path: Path, part: str) -> None:
    vocabularies.save(vocabularies.byte_level(), tmp_path)
    path = tmp_path / "tokenizer.json"
    text = json.dumps(json.loads(path.read_text()))
    first = text.split(part, 1)[1].split(",", 1)[0]
    path.write_text(text.replace(part, f"{part}{first}, ", 1))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .* twice; keep one of them"):
        loaded(tmp_path)


def test_an_old_format_is_converted(tmp_path: Path) -> None:
    tok = vocabularies.byte_level()
    state = json.loads(tok.to_str())
    (tmp_path / "vocab.json").write_text(json.dumps(state["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(m) for m in state["model"]["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    actual = loaded(tmp_path)
    assert actual.decode(actual.encode("Hello world")) == "Hello world"
    assert actual.encode("Hello world") == tok.encode("Hello world").ids
    assert actual.eos_token_id == 0
    (tmp_path / "merges.txt").write_text("a b c d\n")
    with pytest.raises(CheckpointError, match="cannot convert"):
        loaded(tmp_path)


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        loaded(tmp_path)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        TOKENIZERS["byte_level"].encode("a\ud800")


@pytest.mark.own_python
def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    vocabularies.save(vocabularies.byte_level(), tmp_path, {}, "{{ messages[0].content }}")
    program = f"""
import sys
from pathlib import Path
from treadle.api.files import ModelFiles
import treadle_hf_tokenizer, treadle_jinja
files = ModelFiles(Path({str(tmp_path)!r}), (), {{}})
tokenizer = treadle_hf_tokenizer.treadle_tokenizer("auto", files)
renderer = treadle_jinja.treadle_renderer("jinja", tokenizer, {{}})
renderer.encode(renderer.render([{{"role": "user", "content": "hi <|im_end|>"}}]))
tokenizer.create_detokenizer().decode_next(5)
print([m for m in ("torch", "transformers", "numpy") if m in sys.modules])
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"


# ------------------------------------------------------------------ long texts


@given(
    st.one_of(
        st.text(max_size=60),
        st.text("the <|im_end|>\t\n", max_size=60),
        st.lists(st.sampled_from(TEXTS)).map("".join),
    ),
    st.sampled_from(sorted(TOKENIZERS)),
    st.booleans(),
)
def test_encoding_is_that_of_the_library(text: str, name: str, special: bool) -> None:
    tokenizer = TOKENIZERS[name]
    try:
        expected = tokenizer.backend.encode(text, add_special_tokens=special).ids
    except Exception as error:  # unknown tokens without an id
        with pytest.raises(type(error)):
            tokenizer.encode(text, add_special_tokens=special)
        return
    assert tokenizer.encode(text, add_special_tokens=special) == expected
    assert tokenizer.decode(expected) == tokenizer.backend.decode(expected)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.min_num_tokens(text) <= len(tokens)


def test_a_bound_of_tokens_is_known_where_nothing_is_lost() -> None:
    for name in ("byte_level", "sentence_piece", "gemma"):
        tokenizer = TOKENIZERS[name]
        longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        assert tokenizer.min_num_tokens("x" * (10 * longest + 1)) == 11
        assert tokenizer.min_num_tokens("é" * 1000) == 0, "its normalizer may shorten this"
    for name in ("metaspace", "word_piece", "words"):
        assert TOKENIZERS[name].min_num_tokens("x" * 1000) == 0
    plain = vocabularies.byte_level()
    plain.normalizer = None  # type: ignore[assignment]
    assert AutoTokenizer(plain).min_num_tokens("é" * 1000) > 0
    plain.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert AutoTokenizer(plain).min_num_tokens("é" * 1000) == 0, "it swallows spaces"


@pytest.mark.parametrize("name", ["byte_level", "sentence_piece"])
def test_other_threads_run_while_a_text_is_encoded_or_decoded(name: str) -> None:
    tokenizer, stopped = TOKENIZERS[name], threading.Event()
    turns = 0

    def count() -> None:
        nonlocal turns
        while not stopped.wait(0.001):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        ids = tokenizer.encode("The quick brown fox jumps. " * 40_000)
        assert turns > 10
        turns = 0
        assert len(tokenizer.decode(ids)) > 1_000_000
        assert turns > 10
    finally:
        stopped.set()
        thread.join()
