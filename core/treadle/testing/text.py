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

from treadle.api.files import ChatRenderer, ModelFiles, SupportsManyTokens, Tokenizer
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
    """Checks of encoding, decoding and detokenizers. ``texts`` must be unchanged by a round trip."""

    texts: ClassVar[tuple[str, ...]] = TEXTS

    def files(self, folder: Path) -> ModelFiles:
        """Return the checkpoint to open the tokenizer from; it may be written to the empty ``folder``."""
        return _files(folder)

    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> Tokenizer:
        return self.plugin_manager().create(TOKENIZERS, self.key, files=self.files(tmp_path))

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
        """Grammars are compiled for all ids, and logprobs may show any of them."""
        for token in range(tokenizer.vocab_size):
            text: Any = tokenizer.id_to_token(token)
            data: Any = tokenizer.token_bytes(token)
            assert isinstance(text, str) and isinstance(data, bytes), f"of the id {token}"

    def test_special_tokens_are_added_only_when_asked(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.special_token_ids.isdisjoint(ids), f"{text!r} became {ids}"
            all_ids = tokenizer.encode(text)
            assert [i for i in all_ids if i not in tokenizer.special_token_ids] == ids

    def test_a_marker_becomes_its_token(self, tokenizer: Tokenizer) -> None:
        """A raw prompt has a single author, who may write markers."""
        for special in sorted(tokenizer.special_token_ids):
            marker = tokenizer.decode([special], skip_special_tokens=False)
            prefix_ids = tokenizer.encode("a", add_special_tokens=False)
            ids = tokenizer.encode(f"a{marker}b", add_special_tokens=False)
            assert not marker or special in ids[len(prefix_ids) :], f"{marker!r} became {ids}"

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
        continuation = "".join(stream.decode_next(token) for token in ids) + stream.flush()
        assert tokenizer.decode(prompt) + continuation == tokenizer.decode([*prompt, *ids])

    def test_a_stream_completes_what_the_prompt_left_open(self, tokenizer: Tokenizer) -> None:
        """A prompt of ids may end inside a character, which the detokenizer then emits."""
        text = "é世👩"
        ids = tokenizer.encode(text, add_special_tokens=False)
        for num_tokens in range(len(ids)):
            stream = tokenizer.create_detokenizer(ids[:num_tokens])
            continuation = (
                "".join(stream.decode_next(token) for token in ids[num_tokens:]) + stream.flush()
            )
            assert text.endswith(continuation) and continuation, (
                f"{continuation!r} behind {num_tokens} tokens of {text!r}"
            )

    def test_two_streams_share_nothing(self, tokenizer: Tokenizer) -> None:
        """Each sequence has its own detokenizer, and they are used alternately."""
        ids = tokenizer.encode(self.texts[2], add_special_tokens=False)
        reference, first, second = (tokenizer.create_detokenizer() for _ in range(3))
        expected = "".join(reference.decode_next(token) for token in ids) + reference.flush()
        pairs = [(first.decode_next(token), second.decode_next(token)) for token in ids]
        for index, stream in enumerate((first, second)):
            assert "".join(pair[index] for pair in pairs) + stream.flush() == expected

    def test_many_tokens_are_decoded_like_each(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer.create_detokenizer(), SupportsManyTokens):
            pytest.skip("it decodes tokens one by one")
        specials = sorted(tokenizer.special_token_ids)[:2]
        for text in self.texts:
            ids = [*tokenizer.encode(text, add_special_tokens=False), *specials] * 2
            for skip in (True, False):
                one, many = (
                    tokenizer.create_detokenizer(ids[:1], skip_special_tokens=skip)
                    for _ in range(2)
                )
                assert isinstance(many, SupportsManyTokens)
                expected = "".join(map(one.decode_next, ids)) + one.flush()
                pieces = [many.decode_many(ids[i : i + 3]) for i in range(0, len(ids), 3)]
                assert "".join(pieces) + many.decode_many([]) + many.flush() == expected

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
                actual = "".join(stream.decode_next(token) for token in ids) + stream.flush()
                assert actual == tokenizer.decode(ids, skip_special_tokens=skip)

    def test_bytes_of_tokens_add_up_to_the_text(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(tokenizer.token_bytes(token) for token in ids)
            assert joined.decode() == text

    def test_threads_may_share_it(self, tokenizer: Tokenizer) -> None:
        def work(text: str) -> list[int]:
            return tokenizer.encode(text)

        texts = [f"{text} {i}" for i in range(40) for text in self.texts]
        expected = [work(text) for text in texts]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, texts)) == expected


class RendererSuite(PluginTest):
    """Checks of rendered prompts, in which no message can add messages of another role."""

    messages: ClassVar[list[dict[str, Any]]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is treadle?"},
    ]

    def files(self, folder: Path) -> ModelFiles:
        """Return the checkpoint of tokenizer and renderer; it may be written to the empty ``folder``."""
        return _files(folder)

    @pytest.fixture
    def parts(self, tmp_path: Path) -> tuple[ChatRenderer, Tokenizer]:
        plugins, files = self.plugin_manager(), self.files(tmp_path)
        tokenizer = plugins.create(TOKENIZERS, "auto", files=files)
        return plugins.create(RENDERERS, self.key, files=files, tokenizer=tokenizer), tokenizer

    def test_what_was_said_is_in_the_prompt_in_order(
        self, parts: tuple[ChatRenderer, Tokenizer]
    ) -> None:
        prompt = parts[0].render(self.messages)
        positions = [prompt.find(message["content"]) for message in self.messages]
        assert -1 not in positions and positions == sorted(positions)

    def test_the_answer_is_opened_only_when_asked(
        self, parts: tuple[ChatRenderer, Tokenizer]
    ) -> None:
        renderer, _ = parts
        with_opening = renderer.render(self.messages, add_generation_prompt=True)
        without_opening = renderer.render(self.messages, add_generation_prompt=False)
        assert with_opening.startswith(without_opening) and len(with_opening) > len(without_opening)

    def test_a_last_message_can_be_continued(self, parts: tuple[ChatRenderer, Tokenizer]) -> None:
        messages = [*self.messages, {"role": "assistant", "content": "It is"}]
        prompt = parts[0].render(messages, add_generation_prompt=False, continue_final_message=True)
        assert prompt.endswith("It is")

    def test_rendering_twice_gives_the_same(self, parts: tuple[ChatRenderer, Tokenizer]) -> None:
        renderer, _ = parts
        first, second = renderer.render(self.messages), renderer.render(self.messages)
        assert first == second and renderer.encode(first) == renderer.encode(second)

    def test_messages_are_left_as_they_are(self, parts: tuple[ChatRenderer, Tokenizer]) -> None:
        messages = [{"role": "user", "content": "What is treadle?"}]
        before = copy.deepcopy(messages)
        parts[0].render(messages)
        assert messages == before

    def test_it_takes_tools_and_arguments(self, parts: tuple[ChatRenderer, Tokenizer]) -> None:
        """A renderer ignores arguments that its template does not use."""
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
        """Other prompts are rendered and encoded between a prompt's rendering and its encoding."""
        renderer, tokenizer = parts
        markers = [
            tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.special_token_ids
        ]
        conversations = [
            [{"role": "user", "content": text}] for text in ("one", "".join(markers), "two")
        ]
        prompts, expected = [], []
        for messages in conversations:
            prompts.append(renderer.render(messages))
            expected.append(renderer.encode(prompts[-1]))
        assert [renderer.encode(prompt) for prompt in prompts] == expected

    def test_a_marker_in_a_message_stays_text(self, parts: tuple[ChatRenderer, Tokenizer]) -> None:
        """Otherwise a user could write a system message."""
        renderer, tokenizer = parts
        markers = [
            tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.special_token_ids
        ]
        counts = []
        for text in ("harmless", "".join(markers)):
            messages = [self.messages[0], {"role": "user", "content": text}]
            ids = renderer.encode(renderer.render(messages))
            counts.append(sum(i in tokenizer.special_token_ids for i in ids))
        assert counts[0] == counts[1], "markers of a message became special tokens"
