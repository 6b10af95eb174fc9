"""Peer memory: two processes of this machine as two nodes, each of which keeps the other's images.

``python -m benchmarks.peer_memory`` is one of the two processes, which ``measure`` starts. A copy is measured from the
end of the capture until the checkpoint is committed on the tier. Its reference is a plain gloo send of the same image,
and a receive of the other's, between the same processes in the same run. Then they train beside copies, and take each
step together, as a training with gradients to exchange does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tierfall
from benchmarks.figures import MIB, Results, over_rounds, paired
from benchmarks.memory import Peaks, resident_bytes
from benchmarks.plan import Plan
from benchmarks.yielding import WIDTH, Training

IMAGE_BYTES = 256 << 20
RANKS = 2
PEERS = "peers"
GLOO, COPY = "peer_memory.gloo", "peer_memory.copy"
COPY_TARGET = 1.25
STEP_TARGET = 1.05
MEMORY_TARGET_BYTES = 64 * MIB
BATCH = 16
"""Steps are short, so that many are beside a copy."""
GPU_WIDTH, GPU_BATCH, GPU_IMAGE_BYTES = 4096, 512, 2 << 30
"""In these steps the device is busy and the host is not, and a copy is as long as many of them."""
STEPS_BETWEEN = 100
"""From the end of a copy to the next save."""
PAIRS_A_ROUND = 3
NEVER = 1_000_000
FIRST_SAVES = 4
"""In which the pace is found."""
SAVES = 3
COPIES_MAX = 2
"""The newest, and the one that arrives."""
JOB_S = 600
SAMPLE_EVERY_S = 0.01


def measure(plan: Plan, say: Callable[[str], None], results: Results) -> None:
    """Measure the part ``peer_memory`` of a plan."""
    most = IMAGE_BYTES if plan.device == "cpu" else GPU_IMAGE_BYTES
    image_bytes = min(most, plan.size_bytes)
    say(f"peer_memory: images of {image_bytes >> 20} MiB, kept by each other's node")
    found = _run_job(plan, image_bytes)
    results.facts["peer_memory_state_bytes"] = image_bytes
    results.samples |= {GLOO: found["gloo_s"], COPY: found["copy_s"]}
    results.findings.append(
        paired(
            "peer memory: a copy, over gloo",
            results.samples,
            subject=COPY,
            reference=GLOO,
            target=COPY_TARGET,
        )
    )
    results.findings.append(
        over_rounds(
            "peer memory: beyond images and copies",
            [value / MIB for value in found["beyond_bytes"]],
            unit="MiB",
            target=MEMORY_TARGET_BYTES / MIB,
        )
    )
    name = "peer memory, beside training"
    results.findings.append(over_rounds(f"{name}: a copy", found["training_copy_s"], unit="s"))
    if slower := found["slower"]:
        steps = f"{name}: steps beside a copy"
        results.findings.append(over_rounds(steps, slower, unit="x", target=STEP_TARGET))
    else:
        say(f"{name}: no copy was as long as a few steps")


# The job -------------------------------------------------------------------------------------------


def _run_job(plan: Plan, image_bytes: int) -> dict[str, Any]:
    """Run both ranks, and return what rank 0 printed."""
    folder = plan.memory / "peer-memory"
    folder.mkdir()
    words = ["--folder", str(folder), "--image-bytes", str(image_bytes)]
    words += ["--rounds", str(plan.rounds), "--device", plan.device]
    port = _free_port()
    ranks = [_start(rank, port, words) for rank in range(RANKS)]
    try:
        outputs = [rank.communicate(timeout=JOB_S)[0] for rank in ranks]
        failed = [number for number, rank in enumerate(ranks) if rank.returncode]
        if failed:
            raise RuntimeError(f"peer_memory: the process of rank {failed[0]} failed: see above")
    finally:
        for each in ranks:
            each.kill()
            each.wait()
        shutil.rmtree(folder)
    answer: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return answer


def _start(rank: int, port: int, words: Sequence[str]) -> subprocess.Popen[str]:
    launcher = {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": "0",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.peer_memory", *words],
        cwd=Path(__file__).resolve().parent.parent,
        env={**os.environ, **launcher},
        stdout=subprocess.PIPE,
        text=True,
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


# One rank ------------------------------------------------------------------------------------------


def _configuration(folder: Path, rank: int) -> dict[str, Any]:
    """Peer memory in a folder of each node, and a disk that no save reaches."""
    host = {"name": "host", "kind": "host", "folder": str(folder / f"memory-{rank}")}
    path = str(folder / f"peers-{rank}")
    peers = {"name": PEERS, "kind": "peer", "path": path}
    disk = {"name": "disk", "kind": "file", "path": str(folder / "disk"), "flush": {"every": NEVER}}
    return {"run": "bench", "max_wait": "10m", "tiers": [host, peers, disk]}


def copies(options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Send an image by gloo and save one, in turn; return the seconds of both, and the memory of more saves."""
    torch.manual_seed(rank)
    weights = torch.randn(options.image_bytes // 4 - 4096)
    received = torch.zeros_like(weights)  # touched, as memory that is used again
    _gloo_s(weights, received)
    before_bytes = resident_bytes()
    folder = options.folder / "copies"
    with tierfall.open(_configuration(folder, rank)) as ckpt:
        saver = _Saver(ckpt, weights)
        for _ in range(FIRST_SAVES):
            saver.save_s()
        gloo_s, copy_s, beyond_bytes = [], [], []
        for _ in range(PAIRS_A_ROUND * options.rounds):
            gloo_s.append(_gloo_s(weights, received))
            copy_s.append(saver.save_s())
        for _ in range(options.rounds):
            kept = _KeptMemory(folder / f"peers-{rank}")
            with Peaks() as peaks, kept, peaks.phase("save"):
                saver.save_s()
            taken = peaks.bytes["save"] - before_bytes
            beyond_bytes.append(taken + kept.peak_bytes - COPIES_MAX * options.image_bytes)
    return {"gloo_s": gloo_s, "copy_s": copy_s, "beyond_bytes": beyond_bytes}


class _Saver:
    """Saves the same tensor, with other values each time."""

    def __init__(self, ckpt: tierfall.Checkpointer, weights: torch.Tensor) -> None:
        self._ckpt = ckpt
        self._weights = weights
        self._step = 0

    def save_s(self) -> float:
        """Save; return the seconds from the end of the capture to the commit."""
        self._step += 1
        self._weights.neg_()
        dist.barrier()
        handle = self._ckpt.save(self._step, {f"weights-{dist.get_rank()}": self._weights})
        self._ckpt.wait_captured()
        handle.wait(PEERS)
        self._ckpt.drain()  # and what it replaces is deleted
        stats = handle.stats
        return stats.durable_s[PEERS] - (stats.captured_s or 0.0)


class _KeptMemory:
    """Samples what is kept in a folder, and remembers the most. The host tier's memory does not count: it is known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kept-memory")
        self.peak_bytes = 0

    def _bytes(self) -> int:
        """Return the bytes of the pages that the files have now; a file may have several names."""
        found = {}
        for folder, _, names in os.walk(self._folder):  # leaves out what is removed meanwhile
            for name in names:
                with suppress(FileNotFoundError):
                    status = os.stat(os.path.join(folder, name))
                    found[status.st_ino] = status.st_blocks * 512
        return sum(found.values())

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, self._bytes())

    def __enter__(self) -> _KeptMemory:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()


def _gloo_s(weights: torch.Tensor, received: torch.Tensor) -> float:
    """Send an image to the other rank, and receive its image; return the seconds."""
    other = 1 - dist.get_rank()
    dist.barrier()
    began = time.perf_counter()
    sent = dist.isend(weights, other)
    dist.recv(received, other)
    if sent is not None:
        sent.wait()
    return time.perf_counter() - began


def train(options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Train beside copies; return what steps beside one take, over steps without, and the seconds of a copy."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    on_cpu = options.device == "cpu"
    found: dict[str, list[float]] = {"slower": [], "training_copy_s": []}
    for number in range(options.rounds):
        folder = options.folder / f"train-{number}"
        with tierfall.open(_configuration(folder, rank)) as ckpt:
            training = Training(
                ckpt,
                PEERS,
                state_bytes=options.image_bytes,
                rank=rank,
                width=WIDTH if on_cpu else GPU_WIDTH,
                batch=BATCH if on_cpu else GPU_BATCH,
                idle_steps=STEPS_BETWEEN,
                device=options.device,
                agree=_all,
            )
            training.run(FIRST_SAVES)
            idle_s, busy_s, copy_s = training.run(SAVES)
        if busy_s:
            slower = statistics.median(busy_s) / statistics.median(idle_s)
            found["slower"].append(slower)
        found["training_copy_s"].append(statistics.median(copy_s))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
    return found


def _all(done: bool) -> bool:
    """Whether all ranks are done; each makes this call after each step, as gradients are exchanged."""
    count = torch.tensor([float(done)])
    dist.all_reduce(count)
    return count.item() == RANKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--image-bytes", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(json.dumps({**copies(options, rank), **train(options, rank)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
