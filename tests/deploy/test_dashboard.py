"""The queries of the dashboard and the alerts name metrics and labels that a running server exports."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from repository import ROOT

sys.path.insert(0, str(ROOT / "tests/server"))
from process import served

DEPLOY = ROOT / "deploy"
BOARD = json.loads((DEPLOY / "grafana/treadle.json").read_text())
ALERTS = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
OF_PROMETHEUS = frozenset({"job", "instance"})
"""Labels that Prometheus adds to every sample."""
ROW = re.compile(r"^\| `(\w+)` \| \w+ \|([^|]*)\|", re.MULTILINE)

Metrics = dict[str, frozenset[str]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """The names of the samples that a server exports after a few requests, and their labels.

    A counter of something that has not happened has no sample: its labels are those of the reference,
    which is generated from the same code.
    """
    prompt = {"prompt": "The capital of France is", "max_tokens": 4}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    log = tmp_path_factory.mktemp("log") / "server.log"
    with served(Path("demo:treadle-demo"), log) as server:
        for path, body, status in (
            ("/v1/completions", prompt, 200),
            ("/v1/completions", {**prompt, "stream": True}, 200),
            ("/v1/chat/completions", {**chat, "stream": True}, 200),
            ("/v1/chat/completions", chat, 200),
            ("/v1/completions", {**prompt, "temperature": -1}, 400),
        ):
            assert server.client.post(path, json=body).status_code == status
        page = server.client.get("/metrics").text
    reference = dict(ROW.findall((ROOT / "docs/ref/metrics.md").read_text()))
    metrics: Metrics = {"up": OF_PROMETHEUS}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            metrics[sample.name] = frozenset(sample.labels) | OF_PROMETHEUS
        if not family.samples:
            name = family.name + "_total" * (family.type == "counter")
            metrics[name] = frozenset(re.findall(r"`(\w+)`", reference[name])) | OF_PROMETHEUS
    assert len(metrics) > 40
    return metrics


def parsed(query: str) -> promql.Expr:
    """Parse a query of a dashboard. Raises ``ValueError`` for a mistake of its syntax."""
    return promql.parse(query.replace("$__rate_interval", "5m"))


def labels_of(node: promql.Expr, metrics: Metrics) -> frozenset[str]:
    """Return the labels of the result. Fails if a selector or a grouping names what does not exist."""
    match node:
        case promql.VectorSelector():
            assert node.name in metrics, f"no metric {node.name}"
            used = {matcher.name for matcher in node.matchers.matchers}
            unknown = used - metrics[node.name]
            assert not unknown, f"{node.name} has no labels {unknown}"
            return metrics[node.name]
        case promql.MatrixSelector():
            return labels_of(node.vector_selector, metrics)
        case promql.AggregateExpr():
            inner = labels_of(node.expr, metrics)
            if node.modifier is None:
                return frozenset()
            assert node.modifier.type == promql.AggModifierType.By
            grouping = frozenset(node.modifier.labels)
            assert grouping <= inner, f"grouped by {grouping - inner}, which are not there"
            return grouping
        case promql.BinaryExpr():
            sides = [labels_of(side, metrics) for side in (node.lhs, node.rhs)]
            vectors = [labels for labels, side in zip(sides, (node.lhs, node.rhs), strict=True)
                       if not isinstance(side, promql.NumberLiteral)]  # fmt: skip
            return frozenset.intersection(*vectors)
        case promql.Call():
            vectors = [labels_of(arg, metrics) for arg in node.args]
            return vectors[-1] - {"le"} if node.func.name == "histogram_quantile" else vectors[0]
        case promql.ParenExpr():
            return labels_of(node.expr, metrics)
        case promql.NumberLiteral():
            return frozenset()
    raise AssertionError(f"what is {type(node).__name__}?")


def legend_labels(text: str) -> set[str]:
    return set(re.findall(r"{{ *(?:\$labels\.)?(\w+) *}}", text))


def test_every_query_of_the_dashboard_finds_what_it_names(exported: Metrics) -> None:
    assert len(TARGETS) > 20
    for title, target in TARGETS:
        try:
            labels = labels_of(parsed(target["expr"]), exported)
        except (AssertionError, ValueError) as error:
            pytest.fail(f"panel {title!r}: {error}: {target['expr']}")
        assert legend_labels(target["legendFormat"]) <= labels, f"the legend of panel {title!r}"


def test_every_alert_finds_what_it_names(exported: Metrics) -> None:
    assert len(ALERTS) >= 5
    for rule in ALERTS:
        labels = labels_of(parsed(rule["expr"]), exported)
        text = rule["annotations"]["summary"]
        assert legend_labels(text) <= labels, f"{rule['alert']}: {text}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_variables_of_the_dashboard_have_values(exported: Metrics) -> None:
    variables = {item["name"]: item for item in BOARD["templating"]["list"]}
    assert {"source", "model", "instance"} == variables.keys()
    for item in variables.values():
        if item["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", item["definition"])
            assert match is not None and item["query"]["query"] == item["definition"]
            assert match[2] in labels_of(parsed(match[1]), exported)
    used = {name for _, t in TARGETS for name in re.findall(r"\$(\w+)", t["expr"])}
    assert used == {"model", "instance", "__rate_interval"}


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("treadle_nothing", "no metric treadle_nothing"),
        ("sum(rate(treadle_prompt_tokens[5m]))", "no metric treadle_prompt_tokens"),
        ('up{jop="treadle"}', "has no labels {'jop'}"),
        ("sum by (model) (treadle_engine_up)", "grouped by"),
        ("sum by (reason) (sum by (model_name) (treadle_engine_up))", "grouped by"),
        ("1 + (2 * treadle_nothing)", "no metric"),
    ],
)
def test_the_check_finds_faults(query: str, fault: str) -> None:
    names = {"treadle_engine_up", "treadle_prompt_tokens_total", "up"}
    metrics = {name: frozenset({"model_name"}) | OF_PROMETHEUS for name in names}
    with pytest.raises(AssertionError, match=re.escape(fault)):
        labels_of(parsed(query), metrics)


def test_no_two_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))


def metric_names(data: object) -> Iterator[str]:
    if isinstance(data, dict):
        for value in data.values():
            yield from metric_names(value)
    elif isinstance(data, list):
        for value in data:
            yield from metric_names(value)
    elif isinstance(data, str) and data.startswith("treadle_"):
        yield data


def test_the_autoscaler_scales_by_a_metric_that_exists(exported: Metrics) -> None:
    text = (DEPLOY / "kubernetes/autoscaler.yaml").read_text()
    names = set(metric_names(yaml.safe_load(text)))
    assert names and names <= exported.keys()
    chart = (DEPLOY / "helm/treadle/templates/autoscaler.yaml").read_text()
    assert names == set(re.findall(r"treadle_\w+", chart))
