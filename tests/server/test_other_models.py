"""Routes that need models of other kinds say so, in the form of errors of their path."""

from __future__ import annotations

import pytest
from serving import serving

from treadle_server.routes.answers import OTHER_MODELS


async def test_a_route_says_which_models_would_serve_it() -> None:
    paths = [*OTHER_MODELS, "/audio/transcriptions", "/audio/translations", "/images/edits"]
    async with serving() as server:
        for path in paths:
            for root in ("", "/v1"):
                answer = await server.post(f"{root}{path}", {"model": "scripted", "input": "hi"})
                error = answer.json()["error"]
                assert answer.status_code == 404 and error["type"] == "not_found_error"
                assert f"{root}{path} needs a model that" in error["message"]
        speech = await server.post("/v1/audio/speech", {})
        assert "makes speech" in speech.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/audiobooks", "/scores", "/nowhere/embeddings"])
async def test_other_paths_are_only_unknown(path: str) -> None:
    async with serving() as server:
        answer = await server.client.get(path)
    assert answer.status_code == 404 and "no such route" in answer.json()["error"]["message"]


async def test_a_client_of_ollama_reads_it_too() -> None:
    pytest.importorskip("treadle_ollama")
    async with serving() as server:
        for path in ("/api/embed", "/api/embeddings"):
            answer = await server.post(path, {"model": "scripted", "input": "hi"})
            assert answer.status_code == 404
            assert f"{path} needs a model that embeds texts" in answer.json()["error"]
