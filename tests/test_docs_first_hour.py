"""docs/first-hour.md and README: their programs and commands are run in order, and print what the pages show."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

import tierfall
from tests.distributed.job import Job
from tests.forked import Forked, server_of
from tests.object_store import SeaweedFS
from tests.test_docs_cli import words_of

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "first-hour.md").read_text()
PROGRAMS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))
KILLED_AFTER = 30
WAIT_S = 240.0
_OWN = (  # what differs from run to run
    (re.compile(r"^process \d+|^by +\S+|^saved .*", re.MULTILINE), "WHAT"),
    (re.compile(r"\.\d+e-\d+"), ""),
)


def session() -> list[tuple[str, str]]:
    """Every command of the page, with what it prints."""
    blocks = re.findall(r"^```console\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(line, shown) for line, _, shown in (part.partition("\n") for part in parts)]


def compared(text: str) -> list[list[str]]:
    for pattern, word in _OWN:
        text = pattern.sub(word, text)
    return words_of(text)


class Shell:
    """A folder with the page's programs, and the environment that its commands are run in."""

    def __init__(self, folder: Path, memory: Path) -> None:
        self.folder = folder
        self.memory = memory
        known = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "TIERFALL"))}
        self.environ = known | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RES_OPTIONS": "timeout:1 attempts:1",
        }

    def start(self, line: str) -> Forked:
        """Start a command of one process; what it prints on standard error goes to its standard output."""
        program, *words = line.split()
        command = {"python": words, "tierfall": ["-m", "tierfall", *words]}[program]
        return Forked(server_of(), command, self.environ, None, cwd=self.folder)

    def run(self, line: str) -> str:
        if line.startswith("torchrun"):
            printed, code = self.run_ranks(line)
        else:
            process = self.start(line)
            printed, _ = process.communicate(WAIT_S)
            code = process.wait()
        assert code == 0, printed
        if line.startswith("tierfall init"):
            file = self.folder / "tiers.yaml"
            own = f'kind: host, folder: "{self.memory}"}}'
            file.write_text(file.read_text().replace("kind: host}", own))
        return printed

    def run_ranks(self, line: str) -> tuple[str, int]:
        """Start ranks as torchrun does; torchrun itself: tests/distributed/test_elastic.py."""
        _, option, count, *words = line.split()
        assert option == "--nproc-per-node"
        job = Job(self.folder, int(count))
        try:
            for rank in range(job.world_size):
                job.start_command(rank, words, cwd=self.folder, **self.environ)
            printed = "".join(process.communicate(WAIT_S)[0] for process in job.processes)
            return printed, max(process.wait() for process in job.processes)
        finally:
            job.kill()

    def run_and_kill(self, line: str, committed: Path) -> str:
        """Run a program and kill it by SIGKILL once that commit record is there."""
        process = self.start(line)
        last_s = time.monotonic() + WAIT_S
        while not committed.exists():
            assert time.monotonic() < last_s
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        process.kill()
        printed, _ = process.communicate()
        assert process.wait() == -signal.SIGKILL
        return (
            "".join(x for x in printed.splitlines(True) if not x.startswith("tierfall:"))
            + "Killed\n"
        )


@pytest.fixture
def shell(tmp_path: Path, memory: Path) -> Shell:
    folder = tmp_path / "first-hour"
    folder.mkdir()
    for name, code in PROGRAMS.items():
        (folder / name).write_text(code)
    return Shell(folder, memory)


@pytest.mark.timeout(900)
def test_every_command_prints_what_the_page_shows(shell: Shell, s3_server: SeaweedFS) -> None:
    s3_server.make_bucket("my-bucket")
    store = {"AWS_ENDPOINT_URL": s3_server.endpoint, "AWS_REGION": "us-east-1"}
    store |= {"AWS_ACCESS_KEY_ID": s3_server.key, "AWS_SECRET_ACCESS_KEY": s3_server.secret}
    played = 0
    for line, shown in session():
        if line.startswith("export AWS_"):
            assert set(re.findall(r"(\w+)=", line)) < set(store)
            shell.environ |= store
        elif line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            shell.environ[name] = value
        else:
            kill = shown.endswith("Killed\n")
            step = f"step-{KILLED_AFTER:08}-a0001/commit.json"
            committed = shell.folder / "checkpoints" / "first-hour" / step
            printed = shell.run_and_kill(line, committed) if kill else shell.run(line)
            if kill:  # the steps need no more time than they take
                train = shell.folder / "train.py"
                train.write_text(train.read_text().replace("sleep(0.1)", "sleep(0)"))
            assert compared(printed) == compared(shown), line
            played += 1
    s3_server.remove_bucket("my-bucket")
    assert played == TEXT.count("\n$ ") - TEXT.count("\n$ export") > 8


def test_what_is_installed_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for page in ("docs/first-hour.md", "README.md", "docs/which-tiers.md"):
        text = (ROOT / page).read_text()
        assert set(re.findall(r"tierfall\[(\w+)\]", text)) <= set(extras)
    assert "pip install tierfall" in TEXT


README = (ROOT / "README.md").read_text()


@pytest.mark.timeout(900)
def test_ten_lines_of_the_readme_are_killed_and_go_on(shell: Shell) -> None:
    """Its loop neither pauses nor flushes what it prints: here it does both, to be killed in the middle."""
    block: Callable[[str], str] = lambda kind: re.findall(  # noqa: E731
        rf"^```{kind}\n(.*?)^```", README, re.DOTALL | re.MULTILINE
    )[0]
    own = f'kind: host, folder: "{shell.memory}"}}'
    (shell.folder / "tiers.yaml").write_text(block("yaml").replace("kind: host}", own))
    loop = block("python")
    paused = loop.replace("loss.backward()", "loss.backward(); __import__('time').sleep(0.01)")
    flushed = paused.replace('"a new run")', '"a new run", flush=True)')
    (shell.folder / "first.py").write_text(flushed)
    committed = shell.folder / "fast" / "first" / "step-00000300-a0001" / "commit.json"
    assert shell.run_and_kill("python first.py", committed) == "a new run\nKilled\n"
    (shell.folder / "first.py").write_text(loop)
    (shown,) = (
        text
        for text in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
        if "first.py" in text
    )
    listed, _, restored = shown.partition("$ python first.py\n")
    (line, _, table) = listed.removeprefix("$ ").partition("\n")
    assert compared(shell.run(line)) == compared(table)
    assert compared(shell.run("python first.py")) == compared(restored)
    again = shell.run("python first.py")
    assert again.startswith("restored step 399 (attempt 2) in ")
    assert "Started again after its end, the program restores step 399" in README
    file = shell.folder / "tiers.yaml"
    file.write_text(file.read_text().replace("run: first", "run: second"))
    (shell.folder / "first.py").write_text(loop.replace("400", "2"))
    *warning, answer = shell.run("python first.py").splitlines()
    assert (answer, len(warning)) == ("a new run", 1)
    assert "Other runs on these tiers: first. To continue" in warning[0]


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
