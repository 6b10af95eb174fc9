"""docs/first-hour.md and README: their programs and commands are run in order, and print what the pages show."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

import tierfall
from tests.distributed.job import Job
from tests.forked import Forked, server_of
from tests.steps import wait_until
from tests.test_docs_cli import words_of

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "first-hour.md").read_text()
README = (ROOT / "README.md").read_text()
PROGRAMS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))
WAIT_S = 240.0
_LOGGED = re.compile(r"^run [\w-]+ is (open|closed).*\n", re.MULTILINE)
"""What ``open`` and ``close`` show at a terminal alone."""


def session(text: str) -> list[tuple[str, str]]:
    """Every command of a page, with what it prints."""
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(line, shown) for line, _, shown in (part.partition("\n") for part in parts)]


def compared(text: str) -> tuple[list[list[str]], list[str]]:
    """What is to be equal: words, and the steps and attempts."""
    return words_of(text), re.findall(r"\b\d+@\d+|step \d+ \(attempt \d+\)", text)


class AtTerminal:
    """A Python process whose output goes to a terminal."""

    def __init__(self, words: list[str], environ: dict[str, str], folder: Path) -> None:
        self._shows, theirs = pty.openpty()
        self._server = server_of()
        request = {"command": words, "env": environ, "cwd": str(folder)}
        self.pid: int = self._server.ask(request, theirs, theirs)
        os.close(theirs)

    def end(self) -> tuple[str, int]:
        """Wait for its end, and return what it showed, and its exit code."""
        shown = bytearray()
        with suppress(OSError):  # EIO: nobody has the other side open
            while data := os.read(self._shows, 4096):
                shown += data
        os.close(self._shows)
        while (code := self._server.ask(self.pid)) is None:
            time.sleep(0.01)
        return shown.decode().replace("\r\n", "\n"), code


class Shell:
    """A folder with the page's programs, and the environment that its commands are run in."""

    def __init__(self, folder: Path, memory: Path) -> None:
        self.folder = folder
        self.memory = memory
        self.servers: list[subprocess.Popen[bytes]] = []
        known = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "TIERFALL"))}
        self.environ = known | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RES_OPTIONS": "timeout:1 attempts:1",
        }

    def at_terminal(self, line: str) -> AtTerminal:
        return AtTerminal(line.split()[1:], self.environ, self.folder)

    def run(self, line: str) -> str:
        """Run a command to its end. What ``tierfall`` prints is that of a pipe: without colors."""
        program, *words = line.split()
        if program == "torchrun":
            printed, code = self.run_ranks(words)
        elif program == "python":
            printed, code = self.at_terminal(line).end()
            if code == -signal.SIGKILL:
                return printed + "Killed\n"
        else:
            command = ["-m", program, *words]
            process = Forked(server_of(), command, self.environ, None, cwd=self.folder)
            printed, _ = process.communicate(WAIT_S)
            code = process.wait()
        assert code == 0, printed
        if line.startswith("tierfall init"):
            self.use_memory_of_the_test((self.folder / "tiers.yaml").read_text())
        return printed

    def use_memory_of_the_test(self, config: str) -> None:
        own = f'kind: host, folder: "{self.memory}"}}'
        (self.folder / "tiers.yaml").write_text(config.replace("kind: host}", own))

    def run_ranks(self, words: list[str]) -> tuple[str, int]:
        """Start ranks as torchrun does; torchrun itself: tests/distributed/test_elastic.py."""
        option, count, *command = words
        assert option == "--nproc-per-node"
        job = Job(self.folder, int(count))
        try:
            for rank in range(job.world_size):
                job.start_command(rank, command, cwd=self.folder, **self.environ)
            printed = "".join(process.communicate(WAIT_S)[0] for process in job.processes)
            return printed, max(process.wait() for process in job.processes)
        finally:
            job.kill()

    def serve(self, line: str) -> None:
        """Start the page's S3 server, at a port of this test."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        assert self.environ["AWS_ENDPOINT_URL"] == "http://127.0.0.1:8333"
        self.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        command, log = re.fullmatch(r"(.*) > (\S+) 2>&1 &", line).groups()  # type: ignore[union-attr]
        with (self.folder / log).open("wb") as file:
            words = [*shlex.split(command), f"-s3.port={port}"]
            server = subprocess.Popen(
                words, stdout=file, stderr=file, cwd=self.folder, env=self.environ
            )
        self.servers.append(server)
        ready = "components are running and ready to use"
        wait_until(lambda: ready in (self.folder / log).read_text(), ready, 60.0)


@pytest.fixture
def shell(tmp_path: Path, memory: Path) -> Iterator[Shell]:
    folder = tmp_path / "first-hour"
    folder.mkdir()
    for name, code in PROGRAMS.items():
        (folder / name).write_text(code)
    made = Shell(folder, memory)
    yield made
    for server in made.servers:
        server.kill()
        server.wait()


@pytest.mark.timeout(900)
def test_every_command_prints_what_the_page_shows(shell: Shell) -> None:
    train = shell.folder / "train.py"
    assert "sleep(0.1)" in train.read_text()
    train.write_text(train.read_text().replace("sleep(0.1)", "sleep(0.02)"))
    newest = int(re.findall(r"(\d+)@1 is left, on host", TEXT)[0])
    committed = shell.folder / f"checkpoints/first-hour/step-{newest:08}-a0001/commit.json"
    played: list[str] = []
    in_background: AtTerminal | None = None
    for line, shown in session(TEXT):
        program, *words = line.split()
        if program == "export":
            shell.environ |= dict(word.split("=", 1) for word in words)
        elif program == "weed":
            shell.serve(line)
        elif line == "python train.py &":
            in_background = shell.at_terminal(line.removesuffix(" &"))
            wait_until(committed.exists, str(committed), WAIT_S)
            expected = re.sub(r"^\[1\] \d+\n", "", shown)
        elif line == "kill -9 $!":
            assert in_background is not None
            os.kill(in_background.pid, signal.SIGKILL)
            printed, code = in_background.end()
            assert (compared(printed), code) == (compared(expected), -signal.SIGKILL)
            assert re.fullmatch(r"\[1\]\+  Killed +python train.py\n", shown)
        elif program in ("python", "tierfall", "torchrun"):
            if program == "torchrun":  # its ranks have no terminal here
                shown = _LOGGED.sub("", shown)
            assert compared(shell.run(line)) == compared(shown), line
        else:
            assert (program in ("mkdir", "pip"), shown) == (True, ""), line
        played.append(program)
    assert {"kill", "weed", "torchrun"} < set(played)


def test_what_is_installed_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for page in ("docs/first-hour.md", "README.md", "docs/which-tiers.md"):
        text = (ROOT / page).read_text()
        assert set(re.findall(r"tierfall\[(\w+)\]", text)) <= set(extras)
    assert "pip install tierfall" in TEXT


@pytest.mark.timeout(900)
def test_ten_lines_of_the_readme_kill_themselves_and_go_on_as_it_shows(shell: Shell) -> None:
    config, loop = (
        re.findall(rf"^```{kind}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)[0]
        for kind in ("yaml", "python")
    )
    shell.use_memory_of_the_test(config)
    (shell.folder / "first.py").write_text(loop)
    for line, shown in session(README):
        assert compared(shell.run(line)) == compared(shown), line
    assert "restored step 399 (attempt 2) in " in shell.run("python first.py")
    assert "Started again after its end, the program restores step 399" in README
    shell.use_memory_of_the_test(config.replace("run: first", "run: second"))
    (shell.folder / "first.py").write_text(loop.replace("400", "2"))
    opened, warning, answer, closed = shell.run("python first.py").splitlines()
    assert answer == "a new run"
    assert "Other runs on these tiers: first. To continue" in warning
    assert _LOGGED.sub("", f"{opened}\n{closed}\n") == ""


@pytest.mark.parametrize("number", [0, 1], ids=["before", "after"])
def test_a_loop_of_torch_save_and_the_one_in_its_place_go_on_where_they_stopped(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    section = README.partition("## From torch.save")[2].partition("\n## ")[0]
    loop = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[number]
    host = {"name": "host", "kind": "host", "folder": str(shell.memory)}
    tiers = [host, {"name": "disk", "kind": "file", "path": "disk"}]
    config = {"run": "moved", "interval": {"every": 100}, "tiers": tiers}
    (shell.folder / "tiers.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(shell.folder)

    def steps_of(last: int) -> list[int]:
        done: list[int] = []
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())

        def train(step: int) -> None:
            if step == last:
                raise KeyboardInterrupt
            done.append(step)
            model(torch.ones(4)).sum().backward()
            optimizer.step()

        names = {"os": os, "torch": torch, "tierfall": tierfall, "train": train}
        with suppress(KeyboardInterrupt):
            exec(loop, {**names, "model": model, "optimizer": optimizer})
        return done

    assert steps_of(250) == [*range(250)]
    assert steps_of(260) == [*range(201, 260)]
