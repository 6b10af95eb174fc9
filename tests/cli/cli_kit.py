"""What tests of the command line share: a way to run it, trainers that live and trainers that died."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests import forked
from tests.core.ranks.threads import network, on_all
from tests.steps import state_of, wait_until
from tierfall.cli import app
from tierfall.config import Config
from tierfall.run.checkpointer import Checkpointer

ROOT = Path(__file__).resolve().parents[2]
TRAINER = Path(__file__).with_name("trainer.py")


class Answer:
    """What a command wrote, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def document(self) -> dict[str, Any]:
        """stdout as the one JSON document that it must be."""
        found = json.loads(self.out, parse_constant=_no_constant)
        assert isinstance(found, dict)
        return found


def _no_constant(text: str) -> float:
    raise AssertionError(f"{text} is not JSON")


class Cli:
    """Runs commands on one configuration."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        self.path = folder / "tiers.yaml"
        self.configure(config)

    def configure(self, config: dict[str, Any]) -> None:
        self.config = config
        self.path.write_text(json.dumps(config))

    def __call__(self, *words: str, code: int = 0, input: str | None = None) -> Answer:
        """Run a command and compare its exit code; ``code`` -1 takes any."""
        command, *rest = words
        arguments = [command, "--config", str(self.path), *rest]
        answer = run(arguments, input=input)
        assert code in (-1, answer.code), f"{words}: {answer.code}\n{answer.out}\n{answer.err}"
        return answer

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        return self(*words, "--json", code=code).document

    def steps(self) -> dict[str, dict[str, str]]:
        """``ls``: the state of every copy, by step and tier."""
        found = self("ls", "--json", code=-1).document["checkpoints"]
        return {
            f"{c['step']}@{c['attempt']}": {t: copy["state"] for t, copy in c["copies"].items()}
            for c in found
        }


def run(arguments: Sequence[str], input: str | None = None) -> Answer:
    """Run the command line inside this process."""
    result = CliRunner().invoke(app, arguments, input=input, env={"TIERFALL_CONFIG": ""})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def run_process(*arguments: str, **environment: str) -> Answer:
    """Run the command line as a process of its own."""
    done = forked.run(
        ["-m", "tierfall", *arguments],
        cwd=ROOT,
        env={**os.environ, "TIERFALL_CONFIG": "", **environment},
    )
    return Answer(done.returncode, done.stdout, done.stderr)


class Trainer:
    """A training process that does what it is told, one line at a time."""

    def __init__(self, config: Path) -> None:
        self._process = forked.start([str(TRAINER), str(config)])
        self.pid = self._process.pid
        try:
            self.restored = self._read()
        except BaseException:
            self.kill()
            raise

    def tell(self, line: str) -> Any:
        """Give an order, and return what came of it."""
        self.say(line)
        return self._read()

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> Any:
        line = self._process.stdout.readline()
        assert line, f"the trainer ended with {self._process.wait()}"
        return json.loads(line)

    def close(self) -> None:
        """Let it close its run and end."""
        self.say("close")
        assert self._process.wait(60) == 0
        self._process.close()

    def stop(self) -> None:
        """Let it stand still, all of its threads."""
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        wait_until(
            lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the trainer stops"
        )

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.close()


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file; an offset below 0 counts from its end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def save_on_two_nodes(tmp_path: Path) -> dict[str, Any]:
    """Save one step of two nodes; return the configuration of the first, which keeps its image in memory."""

    def config(node: str) -> dict[str, Any]:
        host = {"name": "host", "kind": "host", "folder": str(tmp_path / node / "memory")}
        tiers = [
            {**host, "on_close": "keep"},
            {
                "name": "nvme",
                "kind": "file",
                "path": str(tmp_path / node / "nvme"),
                "shared": False,
            },
            {"name": "pfs", "kind": "file", "path": str(tmp_path / "pfs"), "shared": True},
        ]
        return {"run": "run", "max_wait": "10s", "chunk": "64KiB", "tiers": tiers}

    def train(rank: int) -> None:
        made = Config.model_validate(config("ab"[rank]))
        with Checkpointer(made, ranks=ranks[rank]) as ckpt:
            ckpt.save(1, state_of(1), block=True)

    with network(["a", "b"]) as ranks:
        assert on_all([lambda r=r: train(r) for r in range(2)]) == [None, None]  # type: ignore[misc]
    return config("a")
