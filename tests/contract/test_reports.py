"""What reports, listings, statistics, events, metrics, health, the log and errors say, who may make which call, and how
a run is closed."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import socket
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import tierfall
from tests.contract.faulty import Faulty
from tests.contract.kit import (
    ROOT,
    Log,
    Place,
    blank,
    new_place,
    restored,
    save_steps,
    state_of,
    wait_until,
)
from tierfall.errors import CaptureError, ConfigError, RestoreError, TierfallError

SOON_S = 20.0
EVENT_PAGE = ROOT / "docs" / "metrics.md"
METRIC_PAGE = ROOT / "docs" / "metrics.md"


# Listings and statistics -----------------------------------------------------------------------------


def test_checkpoints_tell_what_lies_where(place: Place) -> None:
    place.config(disk={}, pfs={"flush": {"every": 2}})
    with place.open() as ckpt:
        assert ckpt.checkpoints() == []
        ckpt.save(10, state_of(10), block=True)
        ckpt.save(20, state_of(20), block=True, tags=["best"], metrics={"loss": 0.5})
        ckpt.pin(20)
        ckpt.drain()
        first, second = ckpt.checkpoints()
    assert (first.step, first.attempt, first.ordinal) == (10, 1, 1)
    assert {tier: copy.state for tier, copy in first.copies.items()} == {
        "host": "sealed",
        "disk": "committed",
    }
    assert all(copy.bytes > 0 and copy.damage is None for copy in first.copies.values())
    assert first.bytes > 80_000
    assert first.wall_time_s is not None
    assert 0 <= time.time() - first.wall_time_s < 60
    assert (first.pinned, first.abandoned, first.owed, first.tags) == (False, False, (), ())
    assert first.set_aside == {}
    assert (second.ordinal, second.pinned, second.tags) == (2, True, ("best",))
    assert set(second.copies) == {"host", "disk", "pfs"}
    assert dict(second.metrics) == {"loss": 0.5}


def test_what_is_on_its_way_is_owed_and_a_drain_says_what_is_left(
    place: Place, store: Faulty
) -> None:
    place.config(disk={}, store=store.tier(), max_wait="1s")
    with place.open() as ckpt:
        assert ckpt.drain().done == ()
        store.set("hang", "step-", call="put")
        ckpt.save(1, state_of(1)).wait("disk", SOON_S)
        (info,) = ckpt.checkpoints()
        assert info.owed == ("store",)
        assert info.on("store").split()[0] in ("arriving", "owed")
        report = ckpt.drain(deadline=0.2)
        assert (report.left, report.lost) == (((1, 1, "store"),), ())
        (forecast,) = report.forecast
        assert (forecast.step, forecast.attempt, forecast.tier) == (1, 1, "store")
        assert forecast.reason
        assert "left: 1@1 to store" in repr(report)
        store.heal()
        report = ckpt.drain()
        assert report.left == ()
        assert set(report.done) <= {(1, 1, "store")}, "it may have arrived before the drain"
        (info,) = ckpt.checkpoints()
        assert (info.owed, info.copies["store"].state) == ((), "committed")


def test_statistics_count_what_happened_since_open(place: Place) -> None:
    place.config(disk={"retain": {"last": 1}}, pfs={"compress": {"codec": "zstd"}})
    with place.open() as ckpt:
        empty = ckpt.statistics()
        assert (empty.saves, empty.captured_bytes, empty.blocked_seconds) == (0, 0, 0)
        assert set(empty.newest) == {"process", "node", "site"}
        assert set(empty.newest.values()) == {None}
        assert empty.peer_survival is None
        save_steps(ckpt, 1, 2, 3)
        ckpt.drain()
        wait_until(lambda: ckpt.statistics().deleted_copies["disk"] == 2, "the rules are applied")
        found = ckpt.statistics()
        image = ckpt.checkpoints()[-1].bytes
    assert (found.saves, found.skipped_saves, found.superseded_saves, found.failed_saves) == (
        *(3, 0, 0, 0),
    )
    assert dict(found.commits) == {"disk": 3, "pfs": 3}
    assert found.captured_bytes == found.edge_bytes["host->disk"] == 3 * image
    assert found.captured_seconds > 0 < found.blocked_seconds
    assert {tier for tier, seconds in found.commit_seconds.items() if seconds} == {"disk", "pfs"}
    assert dict(found.newest) == {"process": 3, "node": None, "site": None}
    assert found.capacity_bytes["host"] == 4 << 20
    assert set(found.direct_io) >= {"disk", "pfs"}
    packed = found.compression["pfs"]
    assert "disk" not in found.compression
    assert packed.raw_bytes == 3 * image > packed.stored_bytes > 0
    assert packed.ratio == pytest.approx(packed.raw_bytes / packed.stored_bytes)
    assert (found.write_bytes_per_second["disk"] or 0) > 0
    assert set(found.behind_seconds) == {"disk", "pfs"}
    assert set(found.behind_seconds.values()) == {0}
    for counts in (found.flush_failures, found.given_up_copies, found.set_aside_copies):
        assert counts == {"disk": 0, "pfs": 0}
    assert found.lost_events == 0


def test_the_loss_bound_says_what_each_failure_would_cost_now(place: Place) -> None:
    place.config(disk={}, pfs={"shared": True, "flush": {"every": 2}}, interval={"every": 10})
    with place.open() as ckpt:
        for step in range(1, 26):
            ckpt.maybe_save(step, state_of(step))
        ckpt.drain()
        bound = ckpt.statistics().loss_bound
        process, node, site = bound["process"], bound["node"], bound["site"]  # type: ignore[index]
        assert (str(process.survives), process.tier, process.steps_lost) == ("20@1", "host", 5)
        assert (str(node.survives), node.tier, node.steps_lost) == ("20@1", "pfs", 5)
        assert (site.survives, site.tier) == (None, None)
        assert process.seconds_lost is not None
        assert process.seconds_lost > 0
        reported = re.compile(
            r"process dies: 20@1 is left, on host.* 5 steps.*site is lost: nothing", re.DOTALL
        )
        wait_until(lambda: reported.search(place.cli("ls").out), "the trainer reports it")


def test_the_cadence_says_which_interval_and_why(place: Place) -> None:
    place.config(interval={"every": 4, "at_end": False})
    with place.open() as ckpt:
        for step in range(1, 10):
            ckpt.maybe_save(step, state_of(step))
        found = ckpt.statistics()
    cadence = found.cadence
    assert cadence is not None
    assert (cadence.interval_steps, cadence.bound, cadence.next_step) == (4, "every", 12)
    assert "every" in cadence.reason
    assert cadence.images >= 1
    assert cadence.tiers == ()
    assert found.ettr is not None
    assert 0 < found.ettr <= 1


def test_the_ettr_of_a_run_survives_its_starts_and_is_shown(place: Place) -> None:
    place.config(run="bare")
    place.save(1)
    assert place.json("ls")["run_ettr"] is None, "nothing has timed its steps"
    place.config(interval={"every": 4, "at_end": False})
    began_s = time.time()
    for first in (1, 9):
        with place.open() as ckpt:
            ckpt.restore(blank())
            for step in range(first, first + 8):
                time.sleep(0.005)
                ckpt.maybe_save(step, state_of(step))
            ckpt.drain()
            found = ckpt.statistics()
            kept_s = (found.run_ettr or 0.0) * (time.time() - began_s)
    assert kept_s >= 2 * 7 * 0.005, "the time of both starts counts, but for a first step"
    assert 0 < place.json("ls")["run_ettr"] <= 1
    assert "ETTR of all starts: " in place.cli("ls").out
    assert "ETTR of all starts: " in place.cli("watch", "--once").out


def test_under_mtbf_each_tier_has_an_interval_of_its_own(place: Place) -> None:
    place.config(
        disk={},
        pfs={"shared": True},
        interval={"mtbf": {"process": 1, "node": 100}, "at_end": False},
    )
    with place.open() as ckpt:
        for step in range(1, 3000):
            handle = ckpt.maybe_save(step, state_of(step, elements=10))
            if handle is not None:
                handle.wait(timeout=SOON_S)
            cadence = ckpt.statistics().cadence
            if cadence is not None and cadence.tiers:
                break
    assert cadence is not None
    tiers = {each.tier: each for each in cadence.tiers}
    assert {name: each.mtbf_s for name, each in tiers.items()} == {
        "host": 1,
        "disk": None,  # host memory survives no less
        "pfs": 100,
    }
    pfs = tiers["pfs"]
    assert pfs.interval_s is not None
    assert pfs.flush_every is not None
    assert pfs.interval_s > 0 < pfs.flush_every
    assert all(each.reason for each in cadence.tiers)


def test_prune_returns_a_decision_with_its_reason_for_each_copy(place: Place) -> None:
    place.config()
    place.save(1, 2, 3)
    with place.open() as ckpt:
        restored = ckpt.restore(blank())
        assert restored is not None
        ckpt.pin(1)
        decisions = ckpt.prune(dry_run=True)
    found = {str(d.checkpoint): (d.tier, d.verdict, bool(d.reason), d.bytes > 0) for d in decisions}
    assert found == {f"{step}@1": ("disk", "keep", True, True) for step in (1, 2, 3)}
    assert {d.reason for d in decisions if d.checkpoint.step == 1} == {"pinned"}


def test_fallbacks_name_what_is_damaged_and_not_what_was_left_behind_on_purpose(
    place: Place,
) -> None:
    place.config()
    place.save(1, 2, 5)
    with place.open() as ckpt:
        ckpt.pin(5)
        ckpt.restore(blank(), step=2)
        save_steps(ckpt, 3, 4)
    with place.open() as ckpt:
        report = ckpt.restore(blank())
        assert report is not None
        assert (report.step, report.fallbacks) == (4, ())
        ckpt.delete(4)
        report = ckpt.restore(blank())
        assert report is not None
        assert (report.step, report.fallbacks) == (3, ())
    for folder in place.folders():
        if folder.name.startswith(("step-00000003", "step-00000001")):
            (folder / "rank-00000-of-00001.json").unlink()
    with place.open() as ckpt:
        report = ckpt.restore(blank())
        assert report is not None
        assert report.step == 2
        assert {str(each.id) for each in report.fallbacks} == {"3@2"}, "nothing older"


def test_reports_handles_and_runs_are_shown_as_lines_that_a_person_reads(place: Place) -> None:
    place.config()
    ckpt = place.open()
    for words in ("run", "attempt 1", "host, disk"):
        assert words in repr(ckpt)
    handle = ckpt.save(10, state_of(10), metrics={"loss": 1.5}, tags=["good"], block=True)
    assert re.search(r"step 10 \(attempt 1\): saved", repr(handle))
    assert re.search(r"KiB.*captured.*disk", repr(handle.stats))
    (info,) = ckpt.checkpoints()
    assert re.search(r"step 10 \(attempt 1\).*host, disk.*good.*loss 1.5", repr(info))
    assert re.search(r"saves +1", str(ckpt.statistics()))
    ckpt.close()
    assert "closed" in repr(ckpt)
    with place.open() as ckpt:
        report = ckpt.restore(blank())
    assert re.search(r"^restored step 10 \(attempt 1\) in .* from disk$", repr(report))


# Events ----------------------------------------------------------------------------------------------


def documented_events() -> dict[str, set[str]]:
    table = EVENT_PAGE.read_text().partition("\n### Kinds\n")[2].partition("|---|")[2]
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([^|]*) \|$", table, flags=re.MULTILINE)
    return {kind: set(re.findall(r"`(\w+)`", names)) for kind, names in rows}


COMMON = {"format", "wall_time_s", "run", "rank", "kind"}


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The event log of a run of two starts in which much happens."""
    with new_place(tmp_path_factory.mktemp("events")) as place:
        place.config(
            fast={"retain": {"last": 1}},
            slow={"flush": {"every": 2}},
            events="./{run}-{rank}.jsonl",
        )
        place.save(1, 2, 3, 4)
        with place.open() as ckpt:
            ckpt.restore(blank(), tier="slow")
            with pytest.raises(CaptureError):
                ckpt.save(5, {"w": object()})
            with pytest.raises(RestoreError):
                ckpt.restore(blank(), step=99)
        lines = (place.root / "run-0.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def test_every_event_has_the_members_that_the_page_names(events: list[dict[str, Any]]) -> None:
    page = documented_events()
    for event in events:
        assert set(event) == COMMON | page[event["kind"]], event["kind"]
        assert (event["format"], event["run"], event["rank"]) == (1, "run", 0)
    times = [event["wall_time_s"] for event in events]
    assert times == sorted(times)
    assert times[-1] - time.time() < 60


def test_the_event_log_says_what_became_of_each_save(events: list[dict[str, Any]]) -> None:
    def only(kind: str) -> list[dict[str, Any]]:
        return [event for event in events if event["kind"] == kind]

    kinds = Counter(event["kind"] for event in events)
    assert (kinds["opened"], kinds["closed"], kinds["restored"]) == (2, 2, 1)
    assert (kinds["save_begun"], kinds["captured"]) == (4, 4)
    assert next(event["attempt"] for event in only("opened")) == 1
    assert Counter(e["tier"] for e in only("committed")) == {"fast": 4, "slow": 2}
    assert {tuple(e["tiers"]) for e in only("save_begun")} == {("fast",), ("fast", "slow")}
    assert [e["step"] for e in only("dropped")] == [1, 2, 3]
    assert all("last: 1" in e["reason"] for e in only("dropped"))
    assert list(only("restored")[0]["sources"]) == ["slow"]
    assert kinds["flush_begun"] == kinds["flush_done"] == 6
    for done in only("flush_done"):
        assert sum(done["sources"].values()) == done["bytes"] > 80_000
    (ended,) = only("save_ended")
    assert (ended["step"], ended["outcome"]) == (5, "failed")
    (error,) = only("error")
    assert "99" in error["reason"]


def test_an_event_log_is_bounded_and_fails_nothing(place: Place) -> None:
    log = place.root / "events.jsonl"
    place.config(events={"path": str(log), "max": "64KiB"}, disk={"retain": {"last": 1}})
    with place.open() as ckpt:
        for step in range(1, 40):
            ckpt.save(step, state_of(step, elements=10), block=True)
    older = place.root / "events.jsonl.1"
    assert older.stat().st_size + log.stat().st_size <= 64 << 10
    assert json.loads(log.read_text().splitlines()[-1])["kind"] == "closed"
    assert json.loads(older.read_text().splitlines()[0])["format"] == 1
    (place.root / "file").write_text("in the way")
    place.config(events=str(place.root / "file" / "events.jsonl"), run="other")
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)


def test_subscribers_get_each_event_once_in_order_until_they_unsubscribe(place: Place) -> None:
    place.config(events="./events.jsonl")
    seen: list[dict[str, Any]] = []
    first: list[dict[str, Any]] = []
    raising: list[str] = []

    def spoils(event: dict[str, Any]) -> None:
        raising.append(event["kind"])
        event.clear()
        raise ValueError

    with place.open() as ckpt:
        ckpt.subscribe(spoils)
        ckpt.subscribe(seen.append)
        unsubscribe = ckpt.subscribe(first.append)
        ckpt.save(1, state_of(1), block=True)
        wait_until(lambda: any(e["kind"] == "committed" for e in first), "the commit of step 1")
        unsubscribe()
        unsubscribe()
        ckpt.save(2, state_of(2), block=True)
        for wrong in ("log", lambda: None):
            with pytest.raises(ConfigError, match="subscribe"):
                ckpt.subscribe(wrong)  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (place.root / "events.jsonl").read_text().splitlines()]
    assert lines[0]["kind"] == "opened"
    assert seen == lines[1:]
    assert seen[-1]["kind"] == "closed"
    assert raising == [event["kind"] for event in seen]
    assert {event.get("step") for event in first} == {1}


def test_a_slow_subscriber_holds_up_neither_saves_nor_others_nor_close(
    place: Place, log: Log
) -> None:
    place.config()
    release, other = threading.Event(), list[dict[str, Any]]()
    try:
        with place.open() as ckpt:
            ckpt.subscribe(lambda event: release.wait(60))
            ckpt.subscribe(other.append)
            save_steps(ckpt, 1, 2, 3)
            began = time.monotonic()
        assert time.monotonic() - began < 10
        assert [e["step"] for e in other if e["kind"] == "committed"] == [1, 2, 3]
        assert log.wait("slow")
    finally:
        release.set()


# Metrics and health ----------------------------------------------------------------------------------


def documented_metrics() -> dict[str, tuple[str, bool]]:
    """By name: the section of the page, and whether it has one value per something."""
    found = {}
    for section in ("Counters", "Gauges"):
        table = METRIC_PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        for name, label in re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\|", table, re.MULTILINE):
            found[name] = (section, bool(label))
    return found


def test_metrics_are_flat_finite_documented_numbers(place: Place) -> None:
    place.config(near={}, far={"flush": {"every": 2}}, interval={"every": 1})
    with place.open() as ckpt:
        before = ckpt.metrics_dict()
        for step in (1, 2):
            handle = ckpt.maybe_save(step, state_of(step))
            assert handle is not None
            handle.wait(timeout=SOON_S)
        ckpt.drain()
        ckpt.restore(blank())
        with pytest.raises(CaptureError):
            ckpt.save(3, {"w": object()})
        found, figures = ckpt.metrics_dict(), ckpt.statistics()
    page = documented_metrics()
    for key, value in found.items():
        prefix, name, *of = key.split("/", 2)
        assert prefix == "tierfall"
        assert page[name][1] == bool(of), key
        assert isinstance(value, int | float)
        assert math.isfinite(value)
    assert before["tierfall/saves"] == before["tierfall/commits/far"] == 0
    assert "tierfall/interval_seconds" not in before
    counted = {name: found[f"tierfall/{name}"] for name in ("saves", "failed_saves")}
    assert counted == {"saves": 2, "failed_saves": 1}
    assert (found["tierfall/commits/near"], found["tierfall/commits/far"]) == (2, 1)
    assert found["tierfall/captured_bytes"] == figures.captured_bytes
    assert found["tierfall/edge_bytes/host->near"] == figures.edge_bytes["host->near"]
    assert (found["tierfall/restores"], found["tierfall/step"]) == (1, 3)
    assert found["tierfall/newest/process"] == 2
    assert "tierfall/newest/site" not in found
    assert found["tierfall/interval_steps"] == 1


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def get(port: int, path: str) -> tuple[int, str]:
    """The status and the body of an answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(port: int) -> dict[str, float]:
    """Every sample, by its name with its labels as they are written."""
    status, text = get(port, "/metrics")
    assert status == 200
    rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def health(port: int) -> tuple[int, list[str]]:
    status, text = get(port, "/healthz")
    document = json.loads(text)
    assert document["healthy"] is (status == 200)
    return status, document["reasons"]


def test_the_training_process_serves_its_metrics_while_it_is_open(place: Place, port: int) -> None:
    pytest.importorskip("prometheus_client")
    place.config(disk={}, far={}, metrics={"prometheus": f"127.0.0.1:{port}"})
    commits = 'tierfall_commits_total{rank="0",run="run",tier="far"}'
    with place.open() as ckpt:
        save_steps(ckpt, 1, 2)
        wait_until(lambda: scrape(port).get(commits) == 2, "a status of after the saves")
        found, expected = scrape(port), ckpt.metrics_dict()
        assert health(port) == (200, [])
        assert get(port, "/other")[0] == 404
        with pytest.raises(ConfigError, match=rf"metrics\.prometheus.*{port}"):
            place.open(run="other")
    page = documented_metrics()
    names = {re.match(r"tierfall_(\w+?)(_total)?(_created)?\{", name) for name in found}
    served = {match[1] for match in names if match}
    assert {key.split("/")[1] for key in expected} <= served
    assert served - set(page) <= {"up", "healthy"}
    assert found['tierfall_up{run="run"}'] == 1
    assert found['tierfall_healthy{rank="0",run="run"}'] == 1
    with pytest.raises(urllib.error.URLError):
        get(port, "/metrics")


def test_health_is_a_503_with_the_reason_while_a_tier_takes_nothing(
    place: Place, store: Faulty, port: int
) -> None:
    pytest.importorskip("prometheus_client")
    metrics = {"prometheus": f"127.0.0.1:{port}"}
    place.config(disk={}, store=store.tier(), metrics=metrics, max_wait="0.3s")
    with place.open() as ckpt:
        wait_until(lambda: health(port) == (200, []), "the first status")
        store.set("refuse")
        ckpt.save(1, state_of(1))
        wait_until(lambda: health(port)[0] == 503, "the tier fails")
        (reason,) = health(port)[1]
        assert reason.startswith("tier store does not accept copies")
        assert scrape(port)['tierfall_failing{rank="0",run="run",tier="store"}'] == 1
        store.heal()
        ckpt.drain(SOON_S)
        wait_until(lambda: health(port) == (200, []), "all is well again")


def test_beside_a_trainer_watch_serves_and_shows_the_same(place: Place, port: int) -> None:
    pytest.importorskip("prometheus_client")
    place.config()
    watch = place.begin("watch", "--prometheus", f"127.0.0.1:{port}")
    try:
        assert str(port) in watch.line()
        assert health(port)[0] == 503
        assert scrape(port) == {'tierfall_up{run="run"}': 0}
        with place.open() as ckpt:
            ckpt.save(7, state_of(7), block=True)
            step = 'tierfall_step{rank="0",run="run"}'
            wait_until(lambda: scrape(port).get(step) == 7, "the trainer's status")
            assert health(port) == (200, [])
            wait_until(
                lambda: "7@1" in place.cli("watch", "--once").out, "the commit in a frame", 20
            )
            assert "no trainer" not in place.cli("watch", "--once").out
        assert scrape(port) == {'tierfall_up{run="run"}': 0}
        assert "no trainer" in place.cli("watch", "--once").out
    finally:
        watch.signal(signal.SIGINT)
        watch.end()


# Errors ----------------------------------------------------------------------------------------------


def raised(call: Callable[[], object]) -> TierfallError:
    with pytest.raises(TierfallError) as caught:
        call()
    return caught.value


def frames(error: BaseException) -> list[str]:
    """The files of a traceback below this one."""
    return [f.filename for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]


def test_an_error_ends_at_the_users_line_and_says_each_sentence_once(
    place: Place, log: Log
) -> None:
    config = place.config()
    (place.root / "damaged").mkdir()
    (place.root / "damaged" / "tierfall.json").write_text("{}")
    with place.open() as ckpt:
        handle = ckpt.save(1, state_of(1), block=True)
        calls: list[Callable[[], object]] = [
            lambda: tierfall.open(place.root / "nothing.yaml"),
            lambda: tierfall.open({"run": "run", "tiers": 1}),
            lambda: tierfall.open(config),
            lambda: tierfall.load(place.root / "nothing"),
            lambda: tierfall.load(place.root / "disk", step=9),
            lambda: tierfall.read_pointer(place.root / "damaged"),
            lambda: tierfall.read_pointer(place.root),
            lambda: ckpt.save(1, state_of(1)),
            lambda: ckpt.save(2, {"a": object()}),
            lambda: ckpt.restore({"b": torch.ones(3)}),
            lambda: ckpt.restore(blank(), step=9),
            lambda: ckpt.load(step=9),
            lambda: ckpt.pin(9),
            lambda: handle.wait("nowhere"),
        ]
        for call in calls:
            error = raised(call)
            text = "".join(traceback.format_exception(error))
            assert len(frames(error)) == 1, text
            assert text.count(str(error).splitlines()[0]) == 1
            assert any(r.exc_info and r.exc_info[1] is error for r in log.records), "at DEBUG"
    with pytest.raises(TypeError, match="stepp") as caught:
        ckpt.restore({}, stepp=1)  # type: ignore[call-arg]
    assert not frames(caught.value)


def test_calls_on_a_closed_checkpointer_are_refused(place: Place) -> None:
    place.config()
    ckpt = place.open()
    handle = ckpt.save(1, state_of(1), block=True)
    ckpt.close()
    ckpt.close()
    for call in (
        *(lambda: ckpt.save(2, state_of(2)), lambda: ckpt.restore(blank()), ckpt.metrics_dict),
        *(ckpt.checkpoints, ckpt.drain, lambda: ckpt.pin(1), lambda: ckpt.subscribe(print)),
    ):
        error = raised(call)
        assert isinstance(error, ConfigError)
        assert "closed" in str(error)
    assert handle.outcome == "saved"


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "two"}, "two"),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            "SLURM_NTASKS is 4",
        ),
    ],
)
def test_a_process_alone_among_variables_of_a_job_is_told_which_one_speaks_of_other_ranks(
    place: Place, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    for key in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", *variables):
        monkeypatch.delenv(key, raising=False)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    place.config()
    with pytest.raises(ConfigError, match=named):
        place.open()


def test_config_is_the_model_of_the_file_and_its_schema() -> None:
    schema = tierfall.Config.model_json_schema()
    assert {"run", "interval", "tiers", "events"} <= set(schema["properties"])
    config = tierfall.Config.model_validate({"run": "x", "tiers": "./a"})
    assert [tier.name for tier in config.tiers] == ["host", "disk"]


# Signal handlers -------------------------------------------------------------------------------------


class Signals:
    """An object whose state is asked for within a save, and read within a restore."""

    def state_dict(self) -> dict[str, int]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return {"a": 1}

    def load_state_dict(self, state: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], list[object]]]:
    """``on_signal(call)``: make a call at each SIGUSR1; what it returned or raised is added to the list."""
    before = signal.getsignal(signal.SIGUSR1)

    def install(call: Callable[[], object]) -> list[object]:
        found: list[object] = []

        def handler(number: int, frame: FrameType | None) -> None:
            try:
                found.append(call())
            except TierfallError as error:
                found.append(error)

        signal.signal(signal.SIGUSR1, handler)
        return found

    yield install
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_may_read_a_run_and_not_change_it_within_another_call(
    place: Place, on_signal: Callable[..., list[object]]
) -> None:
    place.config()
    with place.open() as ckpt:
        state = {**state_of(1), "signals": Signals()}
        handle = ckpt.save(1, state_of(1), block=True)
        reads = on_signal(
            lambda: (
                *(ckpt.statistics(), ckpt.checkpoints(), ckpt.metrics_dict(), repr(ckpt)),
                *(handle.stats, handle.outcome, handle.done()),
            )
        )
        ckpt.save(2, state)
        ckpt.restore(state)
        assert len(reads) >= 2
        assert not [each for each in reads if isinstance(each, TierfallError)]
        calls: list[Callable[[], object]] = [
            lambda: ckpt.save(50, state_of(5)),
            lambda: ckpt.maybe_save(50, state_of(5)),
            lambda: ckpt.restore(blank()),
            lambda: ckpt.drain(),
            lambda: ckpt.pin(1),
            lambda: ckpt.close(),
        ]
        for number, call in enumerate(calls, 3):
            found = on_signal(call)
            assert ckpt.save(number, state).step == number
            (error,) = found
            assert isinstance(error, ConfigError)
            assert "within save" in str(error)
        assert ckpt.save(9, state_of(9), block=True).done()


# Opening and closing ---------------------------------------------------------------------------------


def lose_a_checkpointer(place: Place, step: int) -> None:
    """As a notebook's cell does that fails, or is run again."""
    ckpt = place.open()
    ckpt.restore(blank())
    ckpt.save(step, state_of(step))


def test_a_checkpointer_that_no_variable_holds_is_closed_by_replace_or_all_at_once(
    place: Place,
) -> None:
    place.config()
    lose_a_checkpointer(place, 1)
    error = raised(place.open)
    assert isinstance(error, ConfigError)
    for words in ("close_all()", "replace=True"):
        assert words in str(error)
    with place.open(replace=True) as ckpt:
        assert restored(ckpt).step == 1, "what the other had saved was flushed by its close"
        other = place.open(run="other", replace=True)
        assert "closed" not in repr(ckpt), "another run's is not replaced"
        tierfall.close_all()
        assert "closed" in repr(ckpt)
        assert "closed" in repr(other)
    tierfall.close_all()
    with pytest.raises(ConfigError, match="replace"):
        place.open(replace=1)
    assert place.steps() == [1]


def test_close_all_closes_the_others_if_one_fails(place: Place) -> None:
    place.config(on_error="raise", max_wait="0.5s")
    ckpt = place.open()
    run = place.root / "disk" / "run"
    run.rename(place.root / "gone")
    run.write_text("in its way")
    raised(lambda: ckpt.save(1, state_of(1), block=True))
    other = place.open(run="other")
    raised(tierfall.close_all)
    assert "closed" in repr(ckpt)
    assert "closed" in repr(other)


def test_a_close_keeps_what_another_thread_has_saved_and_refuses_the_rest(place: Place) -> None:
    place.config(host={"capacity": "1MiB"}, max_wait="20s")
    ckpt = place.open()
    returned, errors, begun = [0], list[Exception](), threading.Event()

    def train() -> None:
        try:
            for step in range(1, 1000):
                ckpt.save(step, state_of(step))
                returned.append(step)
                begun.set()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    assert begun.wait(SOON_S)
    tierfall.close_all()
    thread.join(SOON_S)
    assert "clos" in str(errors[0])
    assert returned[-1] in place.steps()


def test_an_exception_in_the_block_ends_all_threads_and_keeps_what_was_saved(
    place: Place, log: Log
) -> None:
    place.config()
    before = {thread.name for thread in threading.enumerate()}

    def loop() -> None:
        with place.open() as ckpt:
            ckpt.save(1, state_of(1))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop()
    assert place.steps() == [1]

    def left() -> set[str]:
        return {t.name for t in threading.enumerate() if t.name.startswith("tierfall")} - before

    wait_until(lambda: not left(), f"{left()} have ended")
    assert re.search(r"1@1, on disk", log.wait("a restart continues"))


def test_open_and_close_log_the_newest_checkpoint_and_where_it_is(place: Place, log: Log) -> None:
    place.config(near={}, far={"flush": {"every": 2}})
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.save(2, state_of(2), block=True)
    assert log.wait(r"closed.*2@1, on near, far", logging.INFO)
    with place.open() as ckpt:
        assert log.wait(r"opened.*2@1|2@1.*near", logging.INFO)
        ckpt.restore(blank())
        ckpt.save(3, state_of(3), block=True)
    assert log.wait(r"closed.*3@2, on near$", logging.INFO)


class Stopped(logging.Handler):
    """A terminal that Ctrl-S has stopped: it takes no message of another thread than the training's."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.stopped, self.taken = threading.Event(), threading.Event(), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.stopped.set()
            self.go_on.wait(60)
        self.taken.append(record.getMessage())


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("no route to the log server")


def test_a_log_handler_that_blocks_or_raises_holds_up_and_fails_no_save(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.config(disk={"retain": {"last": 1}}, max_wait="0.5s")
    logger, blocks, raises = logging.getLogger("tierfall"), Stopped(), Raising()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(blocks)
    logger.addHandler(raises)
    try:
        with place.open() as ckpt:
            for step in range(1, 10):
                ckpt.save(step, state_of(step)).wait(timeout=SOON_S)
            assert blocks.stopped.is_set(), "a thread of tierfall's has logged"
            logger.warning("of the training thread")
        assert place.steps() == [9]
        blocks.go_on.set()
        wait_until(lambda: "of the training thread" in blocks.taken, "it is taken")
    finally:
        blocks.go_on.set()
        logger.removeHandler(blocks)
        logger.removeHandler(raises)
        logger.setLevel(level)
    assert "no route to the log server" in capsys.readouterr().err


def test_a_run_of_host_memory_alone_is_warned_of_and_kept(place: Place, log: Log) -> None:
    host = {"name": "host", "kind": "host", "folder": str(place.memory), "capacity": "1MiB"}
    place.write({"run": "r", "tiers": [host]})
    with place.open() as ckpt:
        assert log.wait("host memory alone")
        ckpt.save(1, state_of(1), block=True)
    with place.open() as ckpt:
        assert restored(ckpt).step == 1
