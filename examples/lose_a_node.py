"""Lose a node and all that is in its memory; the next start continues without a read from storage.

python examples/lose_a_node.py    # two processes of this machine stand for two nodes
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tierfall

STEPS_A_START = 5


def train(folder: Path, met_by: str) -> None:
    """What each rank runs. Its node's memory is two folders, which are in /dev/shm on a real node."""
    node = os.environ["GROUP_RANK"]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{met_by}", rank=rank, world_size=world_size)
    tiers = [
        {"name": "host", "kind": "host", "folder": str(folder / node / "host")},
        {"name": "peers", "kind": "peer", "path": str(folder / node / "peers")},
        {"name": "disk", "kind": "file", "path": str(folder / "disk"), "flush": {"every": 1000}},
    ]
    with tierfall.open({"run": "example", "interval": {"every": 1}, "tiers": tiers}) as ckpt:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        report = ckpt.restore(state)
        if report is not None:
            tiers_read = ", ".join(source.tier for source in report.sources)
            say(f"node {node}: step {report.step} from {tiers_read}")
        first = 1 if report is None else report.step + 1
        for step in range(first, first + STEPS_A_START):
            loss = model(torch.randn(32, 256)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            handle = ckpt.maybe_save(step, state)
        assert handle is not None
        handle.wait("peers")
        say(f"node {node}: peer memory has step {handle.step}")
        (folder / node / "ready").touch()
        time.sleep(600)  # until it is lost


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # in one piece: several processes write to one output


def start(folder: Path, number: int) -> list[subprocess.Popen[bytes]]:
    """Start both nodes, as torchrun or Slurm do, and wait until peer memory has what they saved last."""
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, __file__, str(folder), str(folder / f"group-{number}")]
        ranks.append(subprocess.Popen(command, env={**os.environ, **place, **group}))
    marks = [folder / rank / "ready" for rank in ("0", "1")]
    while not all(mark.exists() for mark in marks):
        if any(process.poll() is not None for process in ranks):
            for process in ranks:
                process.kill()
            sys.exit("a rank has ended early; its error is above")
        time.sleep(0.1)
    for mark in marks:
        mark.unlink()
    return ranks


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        for number, lost in enumerate(("1", None)):
            ranks = start(folder, number)
            for process in ranks:
                process.send_signal(signal.SIGKILL)
                process.wait()
            if lost is not None:
                shutil.rmtree(folder / lost)
                say(f"node {lost} is lost, with all that was in its memory")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), sys.argv[2])
    else:
        main()
