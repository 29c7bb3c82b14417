"""A short run of ``abort_storm.py``: a client that leaves takes everything of its request along."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from abort_storm import MODEL, options_for, storm
from departures import BATCHES, ROUTES, Moment, departures
from process import served
from repository import ROOT

pytestmark = pytest.mark.own_python

EVERY = 85
"""Clients after which every route was left at every moment."""
READING = (Moment.FIRST, Moment.MIDDLE, Moment.UNREAD)
"""What only a stream has."""


def test_nothing_is_left_of_clients_that_went_away(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    with served(Path(MODEL), tmp_path / "log", *options_for(folder)) as server:
        report = asyncio.run(storm(server, folder, seed=1, count=EVERY))
    assert report.faults == [], report
    assert report.left.total() == EVERY and report.innocents, report
    assert report.aborted > EVERY / 6, report


def test_every_route_that_generates_is_left_at_every_moment() -> None:
    """A route that is added needs a line in ``departures.py``."""
    document = json.loads((ROOT / "docs" / "ref" / "openapi.json").read_text())
    generating = {
        path
        for path, operations in document["paths"].items()
        if "stream" in body_of(document, operations.get("post", {}))
    } - {"/v1/messages/count_tokens"}
    assert generating == ROUTES.keys()
    clients = list(islice(departures(1, "file"), EVERY))
    left = {(c.path, c.streams, c.moment) for c in clients}
    for path in generating:
        assert {(path, True, moment) for moment in Moment} <= left
        assert {(path, False, m) for m in Moment if m not in READING} <= left
    assert (BATCHES, False, Moment.SENT) in left
    assert clients == list(islice(departures(1, "file"), EVERY))
    assert clients != list(islice(departures(2, "file"), EVERY))


def body_of(document: Any, operation: Any) -> Any:
    """Return the fields of the JSON body of an operation."""
    content = operation.get("requestBody", {}).get("content", {})
    name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"].get(name, {}).get("properties", {})
