"""The store of responses stays within its bounds, and nobody pushes out what others keep."""

from __future__ import annotations

from serving import serving

from treadle_server.responses.store import ENTRY_BYTES, ResponseStore, StoredResponse


def entry(id: str, size: int = 0) -> StoredResponse:
    return StoredResponse(id=id, response=b"x" * size, items=b"", item_ids=frozenset({f"i{id}"}))


def test_the_oldest_goes_and_use_counts() -> None:
    store = ResponseStore(2, 10**6)
    store.put("a", entry("1"))
    store.put("a", entry("2"))
    assert store.get("a", "1") is not None
    store.put("a", entry("3"))
    assert [store.get("a", id) is not None for id in "123"] == [True, False, True]
    assert store.with_item("a", "i2") is None and store.with_item("a", "i3") is not None
    assert store.delete("a", "1") and not store.delete("a", "1")
    assert store.delete("a", "3") and store.num_bytes == len(store) == 0


def test_bytes_are_bounded_over_all_keys_and_the_greediest_pays() -> None:
    store = ResponseStore(10**6, 100 * ENTRY_BYTES)
    store.put("modest", entry("m", ENTRY_BYTES))
    for number in range(1000):
        assert store.put("greedy", entry(str(number), ENTRY_BYTES * (number % 20)))
        assert store.num_bytes <= 100 * ENTRY_BYTES
        assert store.num_bytes == sum(
            kept.size for shelf in store._shelves.values() for kept in shelf.entries.values()
        )
    assert store.get("modest", "m") is not None and store.get("greedy", "m") is None
    assert not store.put("greedy", entry("giant", 100 * ENTRY_BYTES))
    assert store.get("modest", "m") is not None
    assert store.put("greedy", entry("999", 1)) and store.put("greedy", entry("999", 1))
    assert store.num_bytes <= 100 * ENTRY_BYTES


def test_entries_are_bounded_over_all_keys() -> None:
    store = ResponseStore(5, 10**9)
    store.put("modest", entry("m"))
    for number in range(100):
        store.put("greedy", entry(str(number)))
    assert len(store) == 5 and store.get("modest", "m") is not None


async def test_a_server_that_keeps_nothing_says_so() -> None:
    async with serving(max_stored_responses=0) as server:
        made = (await server.post("/v1/responses", {"input": "hi"})).json()
        assert made["status"] == "completed" and made["store"] is False
        assert (await server.client.get(f"/v1/responses/{made['id']}")).status_code == 404


async def test_a_hostile_client_costs_itself_only() -> None:
    async with serving(max_body_bytes=2**20, max_stored_response_bytes=2**16) as server:
        deep = b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        many = {"input": [{"role": "user", "content": ""}] * 20_000}
        for body in (deep, many, {"input": "x", "metadata": {"n": "x" * 513}}):
            answer = await server.post("/v1/responses", body)
            assert answer.status_code == 400, answer.text[:200]
        for number in range(200):
            body = {"input": "hi", "user": "u" * 2000, "metadata": {"n": str(number)}}
            assert (await server.post("/v1/responses", body)).status_code == 200
        assert server.context.responses.num_bytes <= 2**16
        arguments = "[" * 100_000
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        answer = await server.post("/v1/responses", {"input": [call]})
        assert answer.status_code in (200, 400)
        assert (await server.post("/v1/responses", {"input": "hi"})).status_code == 200
