"""A trainer's status: the state of its run, for ``tierfall watch`` and ``ls``; which promises are broken by it; and an
HTTP server that tells it, with ``/metrics`` for Prometheus, and ``/healthz``: 200, or 503 with the broken promises.

A status is one document for each slot, replaced atomically, in the envelope of all documents. Its folder is the user's
own. The file is opened without following links, and accepted only if the user owns it and its digest is good. The
server reads statuses that exist already: a scrape waits neither for a tier nor for the coordinator. The package
prometheus-client writes its format; it is imported only if it is used.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tierfall.core.format import documents
from tierfall.core.ranks.wire import close_in_child
from tierfall.core.types.errors import BackendError, ConfigError, IntegrityError
from tierfall.core.types.text import first_sentence, to_json
from tierfall.core.types.units import format_duration, format_size
from tierfall.core.types.values import TierKind
from tierfall.telemetry.figures import (
    FIGURES,
    PREFIX,
    Figure,
    Statistics,
    to_key,
    to_metrics,
    values_of,
)
from tierfall.telemetry.reports import CheckpointInfo

logger = logging.getLogger("tierfall")

STATUS_BYTES_MAX = 4 << 20


class _StatusPart(BaseModel):
    """Frozen; unknown members, of a newer tierfall, are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class TransferStatus(_StatusPart):
    """A copy in progress; ``bytes_per_s`` and the seconds left, ``left_s``, are None while not known."""

    step: int
    attempt: int
    tier: str
    phase: str
    done_bytes: int
    bytes: int
    bytes_per_s: float | None = None
    left_s: float | None = None


class RunStatus(_StatusPart):
    """The copies of a run, and its figures. ``tiers`` are their kinds by name, in the order of the chain;
    ``checkpoints`` the newest of ``checkpoints_known``, oldest first."""

    run: str
    tiers: dict[str, TierKind]
    checkpoints: tuple[CheckpointInfo, ...]
    checkpoints_known: int
    transfers: tuple[TransferStatus, ...] = ()
    statistics: Statistics = Statistics()


class Status(RunStatus):
    """The run by one rank's process."""

    wall_time_s: float
    pid: int
    start_ticks: int | None
    node: str
    slot: int
    rank: int
    world_size: int
    attempt: int | None
    events: tuple[dict[str, Any], ...] = ()
    failure: str | None = None


def describe_flushes(status: RunStatus) -> str:
    """Return what is being copied to which tier, what is owed, and which tiers accept nothing at present."""
    parts = []
    for one in status.transfers:
        done = f"{format_size(one.done_bytes)} of {format_size(one.bytes)}"
        left = "" if one.left_s is None else f", about {format_duration(one.left_s)} left"
        parts.append(f"{one.step}@{one.attempt} to {one.tier}: {done}{left}")
    owed: dict[str, int] = {}
    for checkpoint in status.checkpoints:
        for tier in checkpoint.owed:
            owed[tier] = owed.get(tier, 0) + 1
    parts += [f"{tier} is owed {count}" for tier, count in owed.items()]
    failing, last = status.statistics.failing, status.statistics.last_error
    errors = {tier: failing.get(tier) or last.get(tier) for tier in status.tiers}
    parts += [f"{tier} fails: {first_sentence(error)}" for tier, error in errors.items() if error]
    return "; ".join(parts) or "no copy is in progress or owed"


def status_name(slot: int) -> str:
    return f"slot-{slot}.status.json"


def write_status(folder: Path, status: Status) -> None:
    """Replace a slot's status atomically. Raises OSError where that fails; no temporary file is left then."""
    path = folder / status_name(status.slot)
    fresh = path.with_suffix(".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    data = documents.seal(to_json(status.model_dump(mode="json")))
    try:
        fd = os.open(fresh, flags, 0o600)
        try:
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, "only a part was written", str(fresh))
        finally:
            os.close(fd)
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def read_status(folder: Path, slot: int) -> Status | None:
    """Return the last status of a slot; None where there is none.

    Raises IntegrityError where the file is no status, or not the user's own; NotSupportedError where a newer tierfall
    wrote it; BackendError where it cannot be read.
    """
    path = folder / status_name(slot)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise IntegrityError(f"{path} is a link or a pipe, and no status: remove it") from error
        raise BackendError(f"reading {path} failed: {error}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise IntegrityError(
                f"{path} is not a regular file of this user, and no status: remove it"
            )
        data = os.read(fd, STATUS_BYTES_MAX)
    except OSError as error:
        raise BackendError(f"reading {path} failed: {error}") from error
    finally:
        os.close(fd)
    members = documents.open_sealed(data, what=f"status {path}")
    try:
        return Status.model_validate(members)
    except ValidationError as error:
        raise IntegrityError(f"status {path}: {error.errors()[0]['msg']}") from error


def remove_status(folder: Path, slot: int) -> None:
    """Remove the status of a slot whose process has ended."""
    try:
        (folder / status_name(slot)).unlink(missing_ok=True)
    except OSError as error:
        logger.debug("the status was not removed: %s", error)


# Which promises of a run are broken ------------------------------------------------------------------


DURABLE_INTERVALS = 2
DURABLE_LEAST_S = 10.0
"""A run that saves every second is not unhealthy because a commit takes a few."""
HANGS_AFTER_S = 15.0
"""The age of a status, which is written every 5 seconds, after which its process may hang."""


def durable_bound_s(every_s: float | None, flush_every: Iterable[int]) -> float | None:
    """Return the greatest healthy time, in seconds, without a commit on a stored tier: twice the interval at which some
    tier is to get a checkpoint. None where ``every_s``, the time between saves, is not known, or there is no such tier.
    """
    least = min(flush_every, default=None)
    if every_s is None or least is None:
        return None
    return max(DURABLE_INTERVALS * every_s * least, DURABLE_LEAST_S)


def broken_promises(status: Status, age_s: float) -> list[str]:
    """Return what is wrong, a sentence each; ``age_s`` is the age of the status in seconds."""
    reasons = []
    if status.failure is not None:
        reasons.append(f"nothing is flushed any more: {status.failure}")
    elif age_s > HANGS_AFTER_S:
        reasons.append(f"the status is {format_duration(round(age_s))} old: the process may hang")
    found, now = status.statistics, to_metrics(status.statistics, age_s)
    reasons += [
        f"tier {tier} does not accept copies: {reason}"
        for tier, reason in found.failing.items()
        if reason
    ]
    for tier in status.tiers:
        behind = now.get(to_key("behind_seconds", tier))
        bound = found.behind_bound_seconds.get(tier)
        if behind is not None and bound is not None and behind > bound:
            reasons.append(
                f"tier {tier} is {format_duration(behind)} behind; flush.within is {format_duration(bound)}"
            )
        if count := found.degraded_copies.get(tier):
            reasons.append(
                f"tier {tier} lacks {count} good copies: they are damaged, could not be read, or were set aside"
            )
    age, bound = now.get(to_key("durable_age_seconds")), found.durable_bound_seconds
    if age is not None and bound is not None and age > bound:
        reasons.append(
            f"no tier got a checkpoint for {format_duration(age)}; at most {format_duration(bound)} are expected"
        )
    return reasons


# The server -----------------------------------------------------------------------------------------
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
