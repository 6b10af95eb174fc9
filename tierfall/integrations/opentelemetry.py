"""tierfall in OpenTelemetry: a gauge per metric, and a trace per save with a span for its capture and for each tier.

detach = attach(ckpt)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tierfall.errors import ConfigError, TierfallError
from tierfall.telemetry.figures import FIGURES, Figure

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from tierfall import Checkpointer

__all__ = ["attach"]

SCOPE = "tierfall"
SAVES_MAX = 1000
"""Saves whose spans may be open: a copy that is never made must not keep memory."""
FRESH_S = 1.0
"""Metrics that are read within so many seconds are read once: a collection asks for each gauge."""


def attach(
    ckpt: Checkpointer,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> Callable[[], None]:
    """Report the metrics and saves of this rank to OpenTelemetry, and return a function that ends that.

    Each metric of ``ckpt.metrics_dict()`` is an observable gauge, ``tierfall.behind_seconds`` for example, with the
    attribute ``tier``, ``loss`` or ``edge`` where it has one value of each. Each save is a span
    ``tierfall.save`` with the children ``tierfall.capture`` and, for each copy to a tier, ``tierfall.flush``. Without
    providers, the global ones are used.

    Raises ConfigError where opentelemetry-api is not installed.
    """
    try:
        from opentelemetry import metrics, trace
    except ImportError as error:
        raise ConfigError(
            "attach: needs the package opentelemetry-api, which is not installed: pip install "
            "'tierfall[opentelemetry]'"
        ) from error
    gauges = _Gauges(ckpt, metrics.get_meter(SCOPE, meter_provider=meter_provider))
    spans = _Spans(trace.get_tracer(SCOPE, tracer_provider=tracer_provider))
    unsubscribe = ckpt.subscribe(spans.receive)

    def detach() -> None:
        unsubscribe()
        gauges.ended = True
        spans.end_all()

    return detach


class _Gauges:
    """The observable gauges, one for each metric. One that has no value now observes nothing."""

    def __init__(self, ckpt: Checkpointer, meter: Any) -> None:
        self.ended = False
        self._ckpt = ckpt
        self._lock = threading.Lock()
        self._read_s: float | None = None
        self._values: dict[str, float] = {}
        for figure in FIGURES.values():
            observe = partial(self._observe, figure)
            meter.create_observable_gauge(f"{SCOPE}.{figure.name}", callbacks=[observe])

    def _read(self) -> dict[str, float]:
        with self._lock:
            now_s = time.monotonic()
            if self._read_s is None or now_s > self._read_s + FRESH_S:
                try:
                    self._values = self._ckpt.metrics_dict()
                except TierfallError:  # the run is closed: there is nothing more to report
                    self._values, self.ended = {}, True
                self._read_s = now_s
            return self._values

    def _observe(self, figure: Figure, options: object) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        if self.ended:
            return []
        found = []
        for key, value in self._read().items():
            _, name, *of = key.split("/", 2)
            if name == figure.name:
                attributes = {figure.per: of[0]} if figure.per and of else {}
                found.append(Observation(value, attributes))
        return found


class _Spans:
    """The spans of saves in progress. ``receive`` is called by one thread."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._lock = threading.Lock()
        self._saves: dict[tuple[int, int], _Save] = {}

    def receive(self, event: Mapping[str, Any]) -> None:
        """Begin or end spans; of a save that began before ``attach`` there are none."""
        with self._lock:
            if event["kind"] == "closed":
                self._end_all(_nanoseconds(event))
            if "step" not in event:
                return
            id = event["step"], event["attempt"]
            if event["kind"] == "save_begun":
                self._begin(id, event)
            elif (save := self._saves.get(id)) is not None and save.receive(event):
                del self._saves[id]

    def end_all(self) -> None:
        with self._lock:
            self._end_all(time.time_ns())

    def _begin(self, id: tuple[int, int], event: Mapping[str, Any]) -> None:
        while len(self._saves) >= SAVES_MAX:
            self._saves.pop(next(iter(self._saves))).end(_nanoseconds(event))
        self._saves[id] = _Save(self._tracer, event)

    def _end_all(self, at: int) -> None:
        for save in self._saves.values():
            save.end(at)
        self._saves.clear()


class _Save:
    """The span of one save, and its children by tier; the capture is the one of no tier."""

    def __init__(self, tracer: Any, event: Mapping[str, Any]) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        at = _nanoseconds(event)
        self._common = {
            f"{SCOPE}.{name}": event[name] for name in ("run", "rank", "step", "attempt")
        }
        attributes = {**self._common, f"{SCOPE}.bytes": event["bytes"]}
        self._span = tracer.start_span(f"{SCOPE}.save", attributes=attributes, start_time=at)
        self._context = set_span_in_context(self._span)
        self._waiting = {None, *event["tiers"]}
        self._begun: dict[str | None, int] = {None: at}
        """When each child began that has not ended."""

    def receive(self, event: Mapping[str, Any]) -> bool:
        """Begin or end a child; return whether the save has ended by that."""
        tier, at = event.get("tier"), _nanoseconds(event)
        match event["kind"]:
            case "captured":
                self._close(None, at, {f"{SCOPE}.blocked_seconds": event["blocked_s"]})
                self._waiting.discard(None)
            case "flush_begun":
                self._close(tier, at)
                self._begun[tier] = at
            case "flush_failed":
                self._close(tier, at, error=event["reason"])
            case "committed":
                self._close(tier, at, {f"{SCOPE}.bytes": event["bytes"]})
                self._waiting.discard(tier)
            case "flush_given_up" | "set_aside":
                self._close(tier, at, error=event["reason"])
                _set_error(self._span, f"{tier}: {event['reason']}")
                self._waiting.discard(tier)
            case "save_ended":
                _set_error(self._span, f"{event['outcome']}: {event['reason']}")
                self._waiting.clear()
        if not self._waiting:
            self.end(at)
        return not self._waiting

    def end(self, at: int) -> None:
        for tier in list(self._begun):
            self._close(tier, at)
        self._span.end(end_time=at)

    def _close(
        self,
        tier: str | None,
        at: int,
        attributes: Mapping[str, float] | None = None,
        *,
        error: str | None = None,
    ) -> None:
        """Report the child of a tier, if one has begun."""
        if tier not in self._begun:
            return
        own = {} if tier is None else {f"{SCOPE}.tier": tier}
        span = self._tracer.start_span(
            f"{SCOPE}.capture" if tier is None else f"{SCOPE}.flush",
            context=self._context,
            attributes={**self._common, **own, **(attributes or {})},
            start_time=self._begun.pop(tier),
        )
        if error is not None:
            _set_error(span, error)
        span.end(end_time=at)


def _set_error(span: Any, reason: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, reason))


def _nanoseconds(event: Mapping[str, Any]) -> int:
    """Return when an event happened, in nanoseconds since 1970: the time of spans."""
    return round(float(event["wall_time_s"]) * 1e9)
