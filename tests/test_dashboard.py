"""The dashboard and the alert rules in ``examples``: they parse, and ask only for metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tierfall.telemetry.figures import FIGURES
from tierfall.telemetry.status import StatusCollector

pytest.importorskip("prometheus_client")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RULES = yaml.safe_load((EXAMPLES / "prometheus-alerts.yaml").read_text())
DASHBOARD = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
FUNCTIONS = {"sum", "avg", "min", "max", "rate", "increase"}
WORDS = {"by", "on", "group_left"}
TOKEN = re.compile(
    r"\s*(?:(?P<string>\"[^\"]*\")|(?P<range>\[\d+[smhd]\])|(?P<name>[a-zA-Z_]\w*)|(?P<number>\d+(?:\.\d+)?)"
    r"|(?P<sign>=~|!=|!~|==|<=|>=|[-+*/<>=(){},]))"
)


def exported() -> dict[str, set[str]]:
    """The labels of each sample that a scrape may have."""
    found = {}
    for family in StatusCollector(lambda: (), run="x").collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        figure = FIGURES.get(family.name.removeprefix("tierfall_"))
        of = {figure.per} if figure is not None and figure.per is not None else set()
        found[name] = {"run", "rank", "instance", *of} - (
            {"rank"} if name == "tierfall_up" else set()
        )
    return found


EXPORTED = exported()


def rules() -> Iterator[dict[str, Any]]:
    for group in RULES["groups"]:
        yield from group["rules"]


def expressions() -> Iterator[tuple[str, str]]:
    """Give each expression with the text that shows it."""
    for rule in rules():
        yield rule["expr"], " ".join(rule["annotations"].values())
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def tokens(expression: str) -> list[tuple[str, str]]:
    """Split an expression; raises ValueError at what is no token, and where brackets do not match."""
    found: list[tuple[str, str]] = []
    place, opened = 0, []
    while place < len(expression):
        match = TOKEN.match(expression, place)
        if match is None:
            raise ValueError(f"at {expression[place:]!r}")
        place = match.end()
        kind, text = next((k, t) for k, t in match.groupdict().items() if t is not None)
        if text in ("(", "{"):
            opened.append(")" if text == "(" else "}")
        elif text in (")", "}") and (not opened or opened.pop() != text):
            raise ValueError(f"{text} closes nothing in {expression!r}")
        found.append((kind, text))
    if opened:
        raise ValueError(f"{opened} are missing in {expression!r}")
    return found


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\btierfall_\w+", expression))


def labels_in(expression: str) -> set[str]:
    """The labels that an expression selects or groups by, and those that its matching names."""
    selected = re.findall(r"[{,]\s*(\w+)\s*(?:=~|!=|!~|=)", expression)
    grouped = re.findall(r"\b(?:by|on) \(([\w, ]*)\)", expression)
    return {*selected, *(name.strip() for names in grouped for name in names.split(","))}


@pytest.mark.parametrize(("expression", "shown"), list(expressions()))
def test_an_expression_asks_for_what_is_exported(expression: str, shown: str) -> None:
    names = {text for kind, text in tokens(expression) if kind == "name"}
    metrics, labels = metrics_in(expression), labels_in(expression)
    assert metrics
    assert metrics <= set(EXPORTED)
    known = set.union(*(EXPORTED[name] for name in metrics))
    assert labels <= known
    assert names - metrics - labels <= FUNCTIONS | WORDS
    displayed = set(re.findall(r"\$labels\.(\w+)", shown)) | set(
        re.findall(r"\{\{(\w+)\}\}", shown)
    )
    assert displayed <= known


def test_counters_are_asked_for_their_increase() -> None:
    counters = {f"tierfall_{x.name}_total" for x in FIGURES.values() if x.counts is not None}
    for expression, _ in expressions():
        for name in metrics_in(expression) & counters:
            assert re.search(rf"(rate|increase)\({name}(\{{[^}}]*\}})?\[", expression), expression


def test_the_rules_have_what_prometheus_requires() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


@pytest.mark.parametrize(
    ("alert", "metric"),
    [
        ("TierfallTierBehind", "tierfall_behind_bound_seconds"),
        ("TierfallNoDurableCheckpoint", "tierfall_durable_bound_seconds"),
        ("TierfallDegradedRedundancy", "tierfall_degraded_copies"),
        ("TierfallLowSpace", "tierfall_free_bytes"),
        ("TierfallTierFailing", "tierfall_failing"),
        ("TierfallTrainerGone", "tierfall_up"),
    ],
)
def test_each_promise_has_an_alert(alert: str, metric: str) -> None:
    (rule,) = [rule for rule in rules() if rule["alert"] == alert]
    assert metric in metrics_in(rule["expr"])
