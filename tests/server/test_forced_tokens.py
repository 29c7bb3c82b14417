"""Tokens that a grammar forces, through ``treadle serve`` and the official client."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from process import Process, served

HELLO: Any = [{"role": "user", "content": "hello"}]
HOT: dict[str, Any] = {"model": "tiny", "temperature": 2.0, "max_tokens": 150}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    from treadle.testing.checkpoints import make_checkpoint

    model = make_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)
    log = tmp_path_factory.mktemp("log") / "server.log"
    server: Process
    with served(model, log, "--served-model-name", "tiny") as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
            yield client
        assert server.settles()
        server.signal(signal.SIGTERM)
        assert server.ends() == 0
        assert "Traceback" not in log.read_text()


def test_tokens_without_a_choice_are_streamed_and_counted(client: openai.OpenAI) -> None:
    """They come together in a chunk; with logprobs each is sampled by itself."""
    schema = {
        "type": "object",
        "properties": {name: {"enum": ["a", "b"]} for name in ("the_first_one", "the_second_one")},
        "required": ["the_first_one", "the_second_one"],
        "additionalProperties": False,
    }
    constraint = {"json": schema, "disable_any_whitespace": True}
    guided = {"extra_body": {"structured_outputs": constraint}}
    for seed in range(3):
        options: Any = {"messages": HELLO, "seed": seed, **HOT, **guided}
        sampled = client.chat.completions.create(logprobs=True, **options)
        whole = client.chat.completions.create(**options)
        assert whole.choices[0].message.content == sampled.choices[0].message.content
        assert whole.usage == sampled.usage and whole.usage is not None
        assert whole.choices[0].finish_reason == "stop"
        chunks = list(
            client.chat.completions.create(
                stream=True, stream_options={"include_usage": True}, **options
            )
        )
        pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert len(list(filter(None, pieces))) < whole.usage.completion_tokens // 2
