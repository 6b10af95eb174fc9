"""The templates in examples/ for what runs when a job or a pod ends: run for real."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import ROOT, Cli, Trainer

from tests import forked
from tests.steps import steps_on

MakeCli = Callable[..., Cli]
Train = Callable[[Cli], Trainer]
EPILOG = ROOT / "examples" / "slurm_epilog.sh"
PRESTOP = ROOT / "examples" / "kubernetes_prestop.sh"


COMMAND = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    asked.sendall(json.dumps([sys.argv[1:], dict(os.environ)]).encode())
    asked.shutdown(socket.SHUT_WR)
    code, out, err = json.load(asked.makefile())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


@pytest.fixture
def bin_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the command in it, which has its process forked here: it does not import torch anew."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "tierfall"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address := f"\0tierfall-test-{os.getpid()}-{tmp_path.name}")
        server.listen()
        command.write_text(COMMAND.format(python=sys.executable, address=address))
        command.chmod(0o755)
        thread = threading.Thread(target=answer_all, args=[server])
        thread.start()
        yield folder
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def answer_all(server: socket.socket) -> None:
    """Run the command for whoever asks, until the server is shut down."""
    while True:
        try:
            asking, _ = server.accept()
        except OSError:
            return
        with asking, asking.makefile() as words:
            arguments, environment = json.load(words)
            done = forked.run(["-m", "tierfall", *arguments], env=environment, cwd=ROOT)
            asking.sendall(json.dumps([done.returncode, done.stdout, done.stderr]).encode())


def hook(script: Path, folder: Path, cli: Cli, **environment: str) -> Any:
    return subprocess.run(
        ["/bin/sh", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "TIERFALL_CONFIG": str(cli.path),
            **environment,
        },
    )


def in_memory_alone(make_cli: MakeCli, train: Train) -> tuple[Cli, Trainer]:
    """A trainer whose step lies in memory, as its tier is too slow; from now on the tier is not."""
    cli = make_cli(far={"bandwidth": "1kB/s"}, max_wait="5s")
    trainer = train(cli)
    trainer.tell("capture 1")
    cli.configure(make_cli(far={}, max_wait="5s").config)
    return cli, trainer


def test_the_epilog_brings_what_a_dead_trainer_left_to_the_tiers(
    make_cli: MakeCli, train: Train, tmp_path: Path, memory: Path, bin_folder: Path
) -> None:
    cli, trainer = in_memory_alone(make_cli, train)
    trainer.kill()
    slurm = {"TIERFALL": str(bin_folder / "tierfall"), "SLURM_JOB_USER": getpass.getuser()}
    done = hook(EPILOG, bin_folder, cli, **slurm)
    assert done.returncode == 0
    assert "run run: 1 of 1 copy made durable" in done.stdout, done.stderr
    assert "in at most 5 min 00 s step 1@1" in done.stderr
    assert steps_on(tmp_path / "far") == [1]
    assert not list(memory.rglob("*.arena"))


def test_the_epilog_never_takes_a_node_out_of_service(
    make_cli: MakeCli, tmp_path: Path, bin_folder: Path
) -> None:
    cli = make_cli()
    slurm = {"TIERFALL": str(bin_folder / "tierfall"), "SLURM_JOB_USER": getpass.getuser()}
    cli.path.write_text("run: [")
    broken = hook(EPILOG, bin_folder, cli, **slurm)
    assert broken.returncode == 0
    assert broken.stderr
    cli.path.unlink()
    absent = hook(EPILOG, bin_folder, cli, **slurm)
    assert (absent.returncode, absent.stdout, absent.stderr) == (0, "", "")


def test_the_prestop_hook_ends_the_trainer_and_drains_what_it_left(
    make_cli: MakeCli, train: Train, tmp_path: Path, bin_folder: Path
) -> None:
    cli, trainer = in_memory_alone(make_cli, train)
    done = hook(PRESTOP, bin_folder, cli, TIERFALL_NOTICE="150")
    assert done.returncode == 0, done.stderr
    assert trainer._process.wait(10) == -15
    assert "run run: 1 of 1 copy made durable" in done.stdout
    assert steps_on(tmp_path / "far") == [1]
    again = hook(PRESTOP, bin_folder, cli)
    assert "nothing is in host memory" in again.stdout, "no trainer lives any more"
