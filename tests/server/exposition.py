"""A page of ``/metrics`` as the client library's parser reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
Page = dict[tuple[str, Labels], float]


def samples(text: str) -> Page:
    """Every sample of a page, which the client library's parser has read."""
    page: Page = {}
    names = set()
    for family in text_string_to_metric_families(text):
        assert family.name not in names, f"{family.name} occurs twice"
        assert family.documentation and family.type != "unknown", family
        names.add(family.name)
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in page, f"{key} occurs twice"
            page[key] = sample.value
    return page


def of(page: Page, name: str, **labels: str) -> dict[Labels, float]:
    return {
        key: value
        for (sample, key), value in page.items()
        if sample == name and labels.items() <= dict(key).items()
    }


def one(page: Page, name: str, **labels: str) -> float:
    (value,) = of(page, name, **labels).values()
    return value
