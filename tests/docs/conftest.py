"""Each test that takes ``page`` runs for every page of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import pages
from repository import ROOT


@pytest.fixture(params=pages(), ids=lambda p: p.relative_to(ROOT).as_posix())
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path
