"""The conformance suites of tokenizers and of chat renderers.

::

    class TestMine(PluginSuite, TokenizerSuite):
        plugin = "tokenizers:mine"

Both run on a byte-level tokenizer with a chat template, unless ``files`` says otherwise.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from treadle.api.files import ChatRenderer, ModelFiles, Tokenizer
from treadle.api.kinds import RENDERERS, TOKENIZERS
from treadle.testing.plugin import PluginTest

__all__ = ("RendererSuite", "TokenizerSuite")

TEXTS = (
    "treadle is an engine",
    "  two spaces,\ttabs\n\nand lines  ",
    "Grüße, 世界! 👩‍👩‍👧 é",
    "{'json': [1, 2.5, null]}",
    "x",
)


def _files(folder: Path) -> ModelFiles:
    from treadle.testing.checkpoints import make_tokenizer

    make_tokenizer(folder)
    names = tuple(sorted(path.name for path in folder.iterdir()))
    return ModelFiles(folder, names, {})


class TokenizerSuite(PluginTest):
    """Encoding, decoding, and streams that say what ``decode`` says. ``texts`` must survive it."""

    texts: ClassVar[tuple[str, ...]] = TEXTS

    def files(self, folder: Path) -> ModelFiles:
        """What the tokenizer is opened from; ``folder`` is empty and yours."""
        return _files(folder)

    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> Tokenizer:
        return self.host().create(TOKENIZERS, self.key, files=self.files(tmp_path))

    def test_texts_survive(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids and tokenizer.decode(ids) == text

    def test_ids_are_below_the_size_of_the_vocabulary(self, tokenizer: Tokenizer) -> None:
        ids: list[Any] = [i for text in self.texts for i in tokenizer.encode(text)]
        assert all(isinstance(i, int) and 0 <= i < tokenizer.vocab_size for i in ids)
        assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.special_token_ids)
        assert tokenizer.eos_token_id is None or tokenizer.eos_token_id < tokenizer.vocab_size

    def test_every_id_has_bytes_and_a_text(self, tokenizer: Tokenizer) -> None:
        """Grammars are compiled for all of them, and logprobs may show any."""
        for token in range(tokenizer.vocab_size):
            text: Any = tokenizer.id_to_token(token)
            stands_for: Any = tokenizer.token_bytes(token)
            assert isinstance(text, str) and isinstance(stands_for, bytes), f"of the id {token}"

    def test_special_tokens_are_added_only_when_asked(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.special_token_ids.isdisjoint(ids), f"{text!r} became {ids}"
            whole = tokenizer.encode(text)
            assert [i for i in whole if i not in tokenizer.special_token_ids] == ids

    def test_a_marker_becomes_its_token(self, tokenizer: Tokenizer) -> None:
        """A prompt is all of one author, who may write them."""
        for special in sorted(tokenizer.special_token_ids):
            marker = tokenizer.decode([special], skip_special_tokens=False)
            before = tokenizer.encode("a", add_special_tokens=False)
            ids = tokenizer.encode(f"a{marker}b", add_special_tokens=False)
            assert not marker or special in ids[len(before) :], f"{marker!r} became {ids}"

    def test_a_stream_says_what_decoding_says(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            stream = tokenizer.create_detokenizer()
            pieces = [stream.decode_next(token) for token in ids]
            assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
            assert not any("\ufffd" in piece for piece in pieces), "half a character came out"

    def test_a_stream_goes_on_after_a_prompt(self, tokenizer: Tokenizer) -> None:
        prompt = tokenizer.encode("The answer is", add_special_tokens=False)
        ids = tokenizer.encode(" forty two", add_special_tokens=False)
        stream = tokenizer.create_detokenizer(prompt)
        grown = "".join(stream.decode_next(token) for token in ids) + stream.flush()
        assert tokenizer.decode(prompt) + grown == tokenizer.decode([*prompt, *ids])

    def test_a_stream_completes_what_the_prompt_left_open(self, tokenizer: Tokenizer) -> None:
        """A prompt of ids may end inside of a character, which is then the stream's."""
        text = "é世👩"
        ids = tokenizer.encode(text, add_special_tokens=False)
        for at in range(len(ids)):
            stream = tokenizer.create_detokenizer(ids[:at])
            grown = "".join(stream.decode_next(token) for token in ids[at:]) + stream.flush()
            assert text.endswith(grown) and grown, f"{grown!r} behind {at} tokens of {text!r}"

    def test_two_streams_share_nothing(self, tokenizer: Tokenizer) -> None:
        """Each sequence has its own, and they grow at the same time."""
        ids = tokenizer.encode(self.texts[2], add_special_tokens=False)
        alone, first, second = (tokenizer.create_detokenizer() for _ in range(3))
        want = "".join(alone.decode_next(token) for token in ids) + alone.flush()
        pairs = [(first.decode_next(token), second.decode_next(token)) for token in ids]
        for place, stream in enumerate((first, second)):
            assert "".join(pair[place] for pair in pairs) + stream.flush() == want

    def test_an_unfinished_character_becomes_a_mark_at_the_end(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("世", add_special_tokens=False)
        if len(ids) < 2:
            pytest.skip("the character is one token")
        stream = tokenizer.create_detokenizer()
        assert "".join(stream.decode_next(token) for token in ids[:-1]) == ""
        assert "\ufffd" in stream.flush()

    def test_special_tokens_can_be_left_out(self, tokenizer: Tokenizer) -> None:
        for special in sorted(tokenizer.special_token_ids):
            ids = [*tokenizer.encode("a", add_special_tokens=False), special]
            assert tokenizer.decode(ids, skip_special_tokens=True) == "a"
            assert len(tokenizer.decode(ids, skip_special_tokens=False)) > 1

    def test_a_stream_leaves_out_what_decoding_leaves_out(self, tokenizer: Tokenizer) -> None:
        words = [tokenizer.encode(text, add_special_tokens=False) for text in ("one", " two")]
        for special in sorted(tokenizer.special_token_ids):
            ids = [*words[0], special, *words[1]]
            for skip in (True, False):
                stream = tokenizer.create_detokenizer(skip_special_tokens=skip)
                told = "".join(stream.decode_next(token) for token in ids) + stream.flush()
                assert told == tokenizer.decode(ids, skip_special_tokens=skip)

    def test_bytes_of_tokens_add_up_to_the_text(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(tokenizer.token_bytes(token) for token in ids)
            assert joined.decode() == text

    def test_threads_may_share_it(self, tokenizer: Tokenizer) -> None:
        def work(text: str) -> list[int]:
            return tokenizer.encode(text)

        many = [f"{text} {i}" for i in range(40) for text in self.texts]
        alone = [work(text) for text in many]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, many)) == alone


class RendererSuite(PluginTest):
    """A prompt that a chat template writes, in which no user can pretend to be somebody else."""

    messages: ClassVar[list[dict[str, Any]]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is treadle?"},
    ]

    def files(self, folder: Path) -> ModelFiles:
        """What tokenizer and renderer are opened from; ``folder`` is empty and yours."""
        return _files(folder)

    @pytest.fixture
    def parts(self, tmp_path: Path) -> tuple[ChatRenderer, Tokenizer]:
        plugins, files = self.host(), self.files(tmp_path)
        tokenizer = plugins.create(TOKENIZERS, "auto", files=files)
        return plugins.create(RENDERERS, self.key, files=files, tokenizer=tokenizer), tokenizer

    def test_what_was_said_is_in_the_prompt_in_order(
        self, parts: tuple[ChatRenderer, Tokenizer]
    ) -> None:
        prompt = parts[0].render(self.messages)
        places = [prompt.find(message["content"]) for message in self.messages]
        assert -1 not in places and places == sorted(places)

    def test_the_answer_is_opened_only_when_asked(
        self, parts: tuple[ChatRenderer, Tokenizer]
    ) -> None:
        renderer, _ = parts
        open_ = renderer.render(self.messages, add_generation_prompt=True)
        closed = renderer.render(self.messages, add_generation_prompt=False)
        assert open_.startswith(closed) and len(open_) > len(closed)

    def test_a_last_message_can_be_continued(self, parts: tuple[ChatRenderer, Tokenizer]) -> None:
        begun = [*self.messages, {"role": "assistant", "content": "It is"}]
        prompt = parts[0].render(begun, add_generation_prompt=False, continue_final_message=True)
        assert prompt.endswith("It is")

    def test_rendering_twice_gives_the_same(self, parts: tuple[ChatRenderer, Tokenizer]) -> None:
        renderer, _ = parts
        once, again = renderer.render(self.messages), renderer.render(self.messages)
        assert once == again and renderer.encode(once) == renderer.encode(again)

    def test_messages_are_left_as_they_are(self, parts: tuple[ChatRenderer, Tokenizer]) -> None:
        said = [{"role": "user", "content": "What is treadle?"}]
        before = copy.deepcopy(said)
        parts[0].render(said)
        assert said == before

    def test_it_takes_tools_and_arguments(self, parts: tuple[ChatRenderer, Tokenizer]) -> None:
        """What it has no use for, it leaves alone."""
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
        prompt = parts[0].render(
            self.messages, tools=[tool], template_arguments={"enable_thinking": False}
        )
        assert all(message["content"] in prompt for message in self.messages)

    def test_encoding_loses_nothing(self, parts: tuple[ChatRenderer, Tokenizer]) -> None:
        renderer, tokenizer = parts
        prompt = renderer.render(self.messages)
        assert prompt in tokenizer.decode(renderer.encode(prompt), skip_special_tokens=False)

    def test_prompts_do_not_meet(self, parts: tuple[ChatRenderer, Tokenizer]) -> None:
        """Others are rendered, and encoded, between a prompt's rendering and its encoding."""
        renderer, tokenizer = parts
        marks = [
            tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.special_token_ids
        ]
        said = [[{"role": "user", "content": text}] for text in ("one", "".join(marks), "two")]
        prompts, soon = [], []
        for messages in said:
            prompts.append(renderer.render(messages))
            soon.append(renderer.encode(prompts[-1]))
        assert [renderer.encode(prompt) for prompt in prompts] == soon

    def test_a_marker_in_a_message_stays_text(self, parts: tuple[ChatRenderer, Tokenizer]) -> None:
        """Otherwise a user could write the system's message."""
        renderer, tokenizer = parts
        marks = [
            tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.special_token_ids
        ]
        counts = []
        for text in ("harmless", "".join(marks)):
            said = [self.messages[0], {"role": "user", "content": text}]
            ids = renderer.encode(renderer.render(said))
            counts.append(sum(i in tokenizer.special_token_ids for i in ids))
        assert counts[0] == counts[1], "markers of a message became special tokens"
