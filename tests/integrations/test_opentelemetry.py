"""OpenTelemetry: a span per save with a child per tier, and a gauge per metric."""

from __future__ import annotations

import builtins
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.media import Medium
from tests.steps import state_of, wait_until
from tierfall.errors import ConfigError
from tierfall.integrations.opentelemetry import attach
from tierfall.telemetry.figures import FIGURES

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

MakeConfig = Callable[..., dict[str, Any]]


class Seen:
    """What a collector has received."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader])

    def attach(self, ckpt: tierfall.Checkpointer) -> Callable[[], None]:
        return attach(ckpt, tracer_provider=self.tracers, meter_provider=self.meters)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def saves(self) -> dict[int, ReadableSpan]:
        found = {}
        for span in self.spans:
            if span.name == "tierfall.save" and span.attributes is not None:
                found[int(str(span.attributes["tierfall.step"]))] = span
        return found

    def children(self, save: ReadableSpan) -> dict[str, ReadableSpan]:
        """The children of a span, by tier; that of the capture by its name."""
        found = {}
        for span in self.spans:
            if span.parent is not None and span.parent.span_id == save.context.span_id:
                found[str((span.attributes or {}).get("tierfall.tier", span.name))] = span
        return found

    def gauges(self) -> dict[str, dict[tuple[tuple[str, Any], ...], float]]:
        """The points of each instrument, by their attributes."""
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: {
                tuple((point.attributes or {}).items()): point.value  # type: ignore[union-attr]
                for point in metric.data.data_points
            }
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_a_save_is_a_span_with_its_capture_and_each_tier(
    make_config: MakeConfig, seen: Seen
) -> None:
    with tierfall.open(make_config(near={}, far={})) as ckpt:
        seen.attach(ckpt)
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
    assert set(seen.saves()) == {1, 2}
    for save in seen.saves().values():
        children = seen.children(save)
        assert set(children) == {"tierfall.capture", "near", "far"}
        assert all(span.status.is_ok or span.status.is_unset for span in children.values())
        assert save.start_time == children["tierfall.capture"].start_time
        assert save.end_time == max(span.end_time or 0 for span in children.values())
        attributes = save.attributes or {}
        assert (attributes["tierfall.run"], attributes["tierfall.attempt"]) == ("run", 1)
        assert int(str(attributes["tierfall.bytes"])) > 80_000


def test_a_copy_that_fails_is_an_error_and_the_next_try_another_span(
    make_config: MakeConfig, seen: Seen, slow_medium: Medium, impatient: None
) -> None:
    with tierfall.open(make_config(slow={})) as ckpt:
        seen.attach(ckpt)
        slow_medium.fail("fsync", errno.EIO, times=1)
        ckpt.save(1, state_of(1), block=False)
        ckpt.drain(20)
        wait_until(lambda: 1 in seen.saves(), "the commit")
    flushes = [span for span in seen.spans if span.name == "tierfall.flush"]
    assert [span.status.is_ok or span.status.is_unset for span in flushes] == [False, True]
    assert "Input/output error" in str(flushes[0].status.description)
    assert seen.saves()[1].status.is_unset


def test_a_save_without_a_result_is_an_error_with_the_reason(
    make_config: MakeConfig, seen: Seen
) -> None:
    config = make_config(slow={"bandwidth": "20kB/s"}) | {"max_wait": "1s"}
    config["tiers"][0] |= {"when_full": "supersede", "capacity": "600KiB"}
    with tierfall.open(config) as ckpt:
        seen.attach(ckpt)
        handles = [ckpt.save(step, state_of(step)) for step in range(1, 6)]
        lost = [handle.step for handle in handles if handle.outcome == "superseded"]
        assert lost
    for step in lost:
        status = seen.saves()[step].status
        assert not status.is_ok
        assert str(status.description).startswith("superseded: ")


def test_spans_in_progress_end_with_the_run_and_with_detach(
    make_config: MakeConfig, seen: Seen
) -> None:
    config = make_config(slow={"bandwidth": "1kB/s"}) | {"max_wait": "0.2s"}
    with tierfall.open(config) as ckpt:
        seen.attach(ckpt)
        other = Seen()
        detach = other.attach(ckpt)
        ckpt.save(1, state_of(1)).captured()
        wait_until(lambda: len(other.spans) == 1, "the capture")
        detach()
        assert set(other.saves()) == {1}
        assert seen.saves() == {}
        ended = len(other.spans)
    assert len(other.spans) == ended
    assert set(seen.children(seen.saves()[1])) == {"tierfall.capture", "slow"}


def test_every_metric_is_a_gauge(make_config: MakeConfig, seen: Seen) -> None:
    with tierfall.open(make_config(near={}, far={})) as ckpt:
        detach = seen.attach(ckpt)
        assert seen.gauges()["tierfall.saves"] == {(): 0}
        ckpt.save(1, state_of(1), block=True)
        wait_until(lambda: "tierfall.newest" in seen.gauges(), "the metrics of a save")
        edge = (("edge", "host->near"),)
        wait_until(lambda: edge in seen.gauges().get("tierfall.edge_bytes", {}), "the copy")
        wait_until(
            lambda: seen.gauges()["tierfall.commits"].get((("tier", "far"),)) == 1, "the commit"
        )
        found = seen.gauges()
        detach()
        assert seen.gauges() == {}
    assert found["tierfall.newest"] == {(("loss", "process"),): 1}
    assert edge in found["tierfall.edge_bytes"]
    assert found["tierfall.step"] == {(): 1}
    assert {name.removeprefix("tierfall.") for name in found} <= set(FIGURES)


def test_without_the_package_the_error_says_what_to_install(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "opentelemetry":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    with tierfall.open(make_config()) as ckpt:
        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(ConfigError, match=r"pip install 'tierfall\[opentelemetry\]'"):
            attach(ckpt)
        monkeypatch.undo()
