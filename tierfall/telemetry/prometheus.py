"""An HTTP server with ``/metrics`` for Prometheus, and ``/healthz``: 200, or 503 with the promises that are broken.

Both are made of statuses that exist already: a scrape neither waits for a tier nor for the coordinator. The package
prometheus-client writes the format; it is imported only where this is used.
"""

from __future__ import annotations

import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tierfall.core.ranks.wire import close_in_child
from tierfall.core.types.errors import ConfigError
from tierfall.telemetry.figures import FIGURES, PREFIX, Figure, values_of
from tierfall.telemetry.status import Status, broken_promises

logger = logging.getLogger("tierfall")
ReadStatuses = Callable[[], Sequence[Status]]
REQUEST_S = 10.0
"""How long a client may take to send its request, in seconds."""
POLL_S = 0.1


class StatusCollector:
    """What prometheus-client collects: the figures of the statuses that ``read`` returns at that moment."""

    def __init__(self, read: ReadStatuses, *, run: str) -> None:
        self._read = read
        self._run = run

    def collect(self) -> Iterable[Any]:
        """Return one family per figure, each value with the labels run and rank."""
        from prometheus_client.core import GaugeMetricFamily

        statuses = [(status, age_of(status)) for status in self._read()]
        up = GaugeMetricFamily(
            f"{PREFIX}_up", "Whether a trainer of the run is alive.", labels=["run"]
        )
        up.add_metric([self._run], float(bool(statuses)))
        healthy = GaugeMetricFamily(
            f"{PREFIX}_healthy", "Whether every promise holds.", labels=["run", "rank"]
        )
        families = {name: _family(figure) for name, figure in FIGURES.items()}
        for status, age_s in statuses:
            labels = [status.run, str(status.rank)]
            healthy.add_metric(labels, float(not broken_promises(status, age_s)))
            for figure, of, value in values_of(status.statistics, age_s):
                families[figure.name].add_metric([*labels, *([of] if of else [])], value)
        return [up, healthy, *families.values()]


def _family(figure: Figure) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    made = GaugeMetricFamily if figure.counts is None else CounterMetricFamily
    labels = ["run", "rank", *([figure.per] if figure.per else [])]
    return made(f"{PREFIX}_{figure.name}", figure.about, labels=labels)


def age_of(status: Status) -> float:
    """Return how old a status is, in seconds."""
    return max(0.0, time.time() - status.wall_time_s)


def health(statuses: Sequence[Status], run: str) -> list[str]:
    """Return the broken promises of all processes of a run, each with its rank where there are several."""
    if not statuses:
        return [f"run {run}: no trainer of it is alive on this machine"]
    return [
        f"rank {status.rank}: {reason}" if status.world_size > 1 else reason
        for status in statuses
        for reason in broken_promises(status, age_of(status))
    ]


class MetricsServer(ThreadingHTTPServer):
    """Serves until ``close``. It answers each request on a thread of its own."""

    daemon_threads = True

    def __init__(
        self, address: str, port: int, read: ReadStatuses, *, run: str, where: str
    ) -> None:
        """Listen on a port; ``address`` is empty for all addresses. ``where`` begins the message of an error.

        Raises ConfigError if prometheus-client is not installed, or the port cannot be used.
        """
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise ConfigError(
                f"{where}: needs the package prometheus-client, which is not installed: pip install "
                "'tierfall[prometheus]'"
            ) from error
        self.run, self.read = run, read
        self.registry = CollectorRegistry()
        self.registry.register(StatusCollector(read, run=run))
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            super().__init__((address, port), _Handler)
        except (OSError, OverflowError) as error:
            named = f"{address or '*'}:{port}"
            raise ConfigError(
                f"{where}: {named} cannot be listened on: {error}; expected a port that is free: of two runs, or a "
                "run and a watch, on one machine each needs its own"
            ) from error
        self._thread = threading.Thread(
            target=self.serve_forever, args=(POLL_S,), name=f"tierfall-{run}-metrics", daemon=True
        )
        self._thread.start()
        close_in_child(self.socket)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # that of HTTPServer asks the DNS for a name

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("metrics: a request failed", exc_info=True)

    def close(self) -> None:
        """Stop serving, and give the port back."""
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = REQUEST_S

    def do_GET(self) -> None:
        from prometheus_client.exposition import choose_encoder

        match self.path.partition("?")[0]:
            case "/metrics":
                encode, kind = choose_encoder(self.headers.get("Accept", ""))
                self._answer(HTTPStatus.OK, kind, encode(self.server.registry))
            case "/healthz":
                reasons = health(self.server.read(), self.server.run)
                status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
                body = json.dumps({"healthy": not reasons, "reasons": reasons})
                self._answer(status, "application/json", f"{body}\n".encode())
            case _:
                text = b"expected /metrics or /healthz\n"
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", text)

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("metrics: " + format, *args)
