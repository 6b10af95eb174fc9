"""Ray Train: workers are killed and restarted by Ray, and no loss is lost; Ray has pointers to what tiers have."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tierfall
from tierfall.backends.posix.backend import PosixBackend

pytest.importorskip("ray.train")


from tierfall.integrations import ray as adapter

PROGRAM = Path(__file__).with_name("ray_program.py")
ROOT = PROGRAM.parents[3]
PATIENCE_S = 400.0
KINDS = "python", "yaml"

MakeConfig = Callable[..., dict[str, Any]]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def place() -> Iterator[str]:
    """Ray's own folder, whose path is short: it has sockets, whose paths have at most 107 bytes. No process of a Ray in
    it outlives the test."""
    with tempfile.TemporaryDirectory(prefix="tf", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder
        kill_all(folder)


@pytest.fixture
def start(tmp_path: Path, place: str) -> Iterator[Start]:
    """``start(program, argument, ...)`` starts a program that starts Ray."""
    started: list[subprocess.Popen[str]] = []
    environment = {
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "RAY_TMPDIR": place,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2",
        "RAY_memory_monitor_refresh_ms": "0",  # else it kills workers where others use the memory
        "OMP_NUM_THREADS": "1",
    }

    def begin(program: Path, *arguments: str) -> subprocess.Popen[str]:
        with open(tmp_path / "errors", "a") as errors:
            started.append(
                subprocess.Popen(
                    [sys.executable, str(program), *arguments],
                    env=os.environ | environment,
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            )
        return started[-1]

    yield begin
    kill_all(place)
    for process in started:
        process.communicate()


def kill_all(place: str) -> None:
    """Kill all processes of a Ray: they inherit its variable."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"RAY_TMPDIR={place}\0".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


def reported(folder: Path, what: str, rank: int) -> list[list[Any]]:
    path = folder / f"rank{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [values for kind, *values in map(json.loads, lines) if kind == what]


def kill(folder: Path, rank: int, what: str, step: int, delay_s: float) -> None:
    """Kill a worker ``delay_s`` after it has reported ``what`` of a step; wait until another process has begun."""
    deadline = time.monotonic() + PATIENCE_S
    while not any(values[0] == step for values in reported(folder, what, rank)):
        assert time.monotonic() < deadline, f"no {what} of step {step}"
        time.sleep(0.001)
    *_, (pid,) = reported(folder, "began", rank)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    while reported(folder, "began", rank)[-1] == [pid]:
        assert time.monotonic() < deadline, "Ray did not start it again"
        time.sleep(0.05)


def checkpoints_of(process: subprocess.Popen[str], folder: Path) -> list[list[Any]]:
    """Wait for the end of a program; return what Ray has: the folder of each checkpoint, and its metrics."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, (folder / "errors").read_text()[-4000:]
    found: list[list[Any]] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.quick), 2])
def test_every_loss_after_a_kill_is_that_of_an_uninterrupted_run(
    start: Start, tmp_path: Path, make_config: MakeConfig, workers: int
) -> None:
    drawn = random.Random(f"ray {workers}")
    tiers = make_config(host={"capacity": "16MiB"}, disk={"shared": True})
    process = start(PROGRAM, str(tmp_path), json.dumps(tiers), str(workers), "whole", "killed")
    killed = tmp_path / "killed"
    kill(killed, drawn.randrange(workers), "loss", 2, 0)  # nothing is saved yet
    kill(killed, drawn.randrange(workers), "loss", drawn.randint(11, 18), drawn.uniform(0, 0.02))
    kill(killed, drawn.randrange(workers), "saves", 25, drawn.uniform(0, 0.004))
    pointers = checkpoints_of(process, tmp_path)
    for rank in range(workers):
        expected = dict(reported(tmp_path / "whole", "loss", rank))
        after = reported(killed, "loss", rank)
        assert sorted(dict(after)) == sorted(expected)
        assert len(after) < 2 * len(expected), "it began anew"
        assert all(loss == expected[step] for step, loss in after)
    assert pointers[-1][1] == {"step": 40}
    for pointer, metrics in pointers:
        assert tierfall.read_pointer(pointer).step == metrics["step"]
        assert sorted(tierfall.load(pointer)) == ["model", "optimizer", "rng"]


@pytest.mark.timeout(600)
def test_an_error_of_one_worker_is_seen_while_the_other_is_in_a_collective(
    start: Start, tmp_path: Path, make_config: MakeConfig
) -> None:
    """Ray restarts both. The one that failed has waited for its copies, and for no answer of the other one."""
    tiers = make_config(host={"capacity": "16MiB"}, disk={"shared": True})
    pointers = checkpoints_of(
        start(PROGRAM, str(tmp_path), json.dumps(tiers), "2", "fails"), tmp_path
    )
    assert pointers[-1][1] == {"step": 40}
    steps = [step for step, _ in reported(tmp_path / "fails", "loss", 1)]
    assert steps == [*range(1, 13), *range(11, 41)]
    output = (tmp_path / "errors").read_text()
    assert "ValueError: a bad batch" in output
    assert "gave no answer" not in output


@pytest.mark.timeout(600)
def test_a_tier_that_fails_ends_no_training_and_ray_has_only_what_is_stored(
    start: Start, tmp_path: Path, make_config: MakeConfig
) -> None:
    tiers = make_config(host={"capacity": "16MiB"}, disk={"shared": True})
    process = start(PROGRAM, str(tmp_path), json.dumps(tiers), "1", "away")
    pointers = checkpoints_of(process, tmp_path)
    assert len(reported(tmp_path / "away", "began", 0)) == 1
    assert [metrics["step"] for _, metrics in pointers] == [5, 10, 15, 20, 25, 30, 35, 40]
    steps = [tierfall.read_pointer(pointer).step for pointer, _ in pointers]
    assert steps[:3] == [5, 10, 10]
    assert steps == sorted(steps)
    assert steps[5:] == [30, 35, 40]
    assert all("model" in tierfall.load(pointer) for pointer, _ in pointers)


def test_a_save_that_finds_no_memory_reports_metrics_alone(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is of no step that a pointer could name."""
    reports: list[dict[str, Any]] = []
    context = SimpleNamespace(get_world_rank=lambda: 0)
    monkeypatch.setattr(adapter.train, "get_context", lambda: context)
    monkeypatch.setattr(adapter.train, "report", lambda *found, **more: reports.append(more))
    real = PosixBackend.create

    def slow(backend: PosixBackend, key: str, **options: Any) -> Any:
        if key.endswith(".safetensors"):
            ended.wait(20)
        return real(backend, key, **options)

    ended = threading.Event()
    monkeypatch.setattr(PosixBackend, "create", slow)
    tiers = make_config(host={"capacity": "5MiB"}, max_wait="1s")
    with tierfall.open(tiers) as ckpt:
        state = {"x": torch.zeros(1 << 20)}
        handles = [ckpt.save(step, state) for step in (1, 2)]
        assert [handle.outcome for handle in handles] == ["pending", "skipped"]
        for handle in handles:
            adapter.report(ckpt, handle, {})
        ended.set()
    assert ["checkpoint" in more for more in reports] == [True, False]


ASKS = "            notice = train.get_preemption_info()\n"
WAITS = """            notice = None
            while step >= 55 and notice is None:
                notice = train.get_preemption_info()
"""
PREEMPTION = """
    import glob, threading
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    def preempt(known):
        while glob.glob("ray/first/*/tierfall.json") == known:
            time.sleep(0.01)
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        client.drain_node(ray.nodes()[0]["NodeID"], reason, "", int(time.time() * 1000) + 60_000)

    known = glob.glob("ray/first/*/tierfall.json")
    threading.Thread(target=preempt, args=(known,), daemon=True).start()
"""
"""Announces to Ray that its node will be taken away in a minute, once another checkpoint has been reported."""


@pytest.mark.timeout(600)
def test_the_script_of_the_page_goes_on_after_a_kill_of_all_of_it_and_saves_before_a_preemption(
    start: Start, tmp_path: Path, memory: Path, place: str
) -> None:
    page = (ROOT / "docs/ray.md").read_text()
    script, tiers = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in KINDS)
    assert ASKS in script
    assert "ray.init()\n" in script
    starts = "ray.init(num_cpus=2, object_store_memory=100 << 20)\n"
    first = script.replace(ASKS, WAITS).replace("ray.init()\n", starts)
    (tmp_path / "tiers.yaml").write_text(
        tiers.replace("kind: host", f"kind: host, capacity: 16MiB, folder: {memory}")
    )
    (tmp_path / "train.py").write_text(first)
    killed = start(tmp_path / "train.py")
    deadline = time.monotonic() + PATIENCE_S
    while not list(tmp_path.glob("ray/first/*/tierfall.json")):
        assert killed.poll() is None, (tmp_path / "errors").read_text()[-4000:]
        assert time.monotonic() < deadline, "Ray got no checkpoint"
        time.sleep(0.001)
    kill_all(place)
    (tmp_path / "train.py").write_text(first.replace(starts, starts + PREEMPTION))
    again = start(tmp_path / "train.py")
    output, _ = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, (tmp_path / "errors").read_text()[-4000:]
    assert output.splitlines()[-1] == "100 ['model', 'optimizer', 'rng']"
    # the kill may come while Ray copies a pointer, of a checkpoint that it has not registered then
    whole = (path for path in tmp_path.glob("ray/first/*/tierfall.json") if path.stat().st_size)
    found = sorted(whole)
    assert tierfall.read_pointer(found[-1]).attempt > 1
    steps = [tierfall.read_pointer(pointer).step for pointer in found]
    assert [step for step in steps if step > 50] == [55, 60, 70, 80, 90, 100]
