"""Two commands at the same moment: the second waits for the first, and takes it for no trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cli_kit import Cli, Trainer

import tierfall
from tests import forked
from tests.steps import blank, files_below, memory_of, state_of, wait_until

MakeCli = Callable[..., Cli]


@pytest.fixture
def copying(make_cli: MakeCli, tmp_path: Path) -> Iterator[Callable[[str], Cli]]:
    """``copying(max_wait)``: a run of which ``tierfall copy`` writes a step to a slow tier for some seconds."""

    def start(max_wait: str) -> Cli:
        cli = make_cli(disk={}, host={"capacity": "16MiB"})
        with tierfall.open(cli.config) as ckpt:
            for step in (1, 2):
                ckpt.save(step, state_of(step, elements=500_000), block=True)
        (tmp_path / "slow").mkdir()
        slow = {"flush": {"every": 9}, "bandwidth": "500KB/s"}
        cli.configure(make_cli(disk={}, slow=slow, max_wait=max_wait).config)
        lock = memory_of(cli.config) / "slot-0.lock"
        words = ["-m", "tierfall", "copy", "1", "--to", "slow", "--config", str(cli.path)]
        started.append(forked.start(words))
        wait_until(lambda: lock.exists() and lock.read_bytes() != b"", "the copy holds the run")
        return cli

    started: list[forked.Forked] = []
    yield start
    for process in started:
        process.kill()
        process.wait()
        process.close()


def test_the_second_waits_and_is_carried_out(copying: Callable[[str], Cli]) -> None:
    cli = copying("60s")
    assert cli("ls").out.count("owns it") == 0, "a command is no trainer"
    pinned = cli("pin", "2")
    assert (pinned.out, pinned.err) == ("pinned 2@1 on disk\n", "")
    assert cli.steps()["1@1"] == {"disk": "committed", "slow": "committed"}


def test_it_waits_no_longer_than_max_wait_and_names_the_command(
    copying: Callable[[str], Cli],
) -> None:
    cli = copying("500ms")
    refused = cli("pin", "2", code=1)
    assert "is owned on this machine by the command 'tierfall copy', process " in refused.err
    assert "trainer" not in refused.err


def test_of_two_imports_of_one_step_the_second_says_that_the_step_is_there(
    make_cli: MakeCli, tmp_path: Path
) -> None:
    cli = make_cli(disk={"bandwidth": "400kB/s"}, max_wait="60s")
    torch.save({"w": torch.ones(500_000)}, tmp_path / "x.pt")
    words = ["import", str(tmp_path / "x.pt"), "--as-step", "5"]
    lock = memory_of(cli.config) / "slot-0.lock"
    with forked.start(["-m", "tierfall", *words, "--config", str(cli.path)]) as first:
        wait_until(lambda: lock.exists() and lock.read_bytes() != b"", "the import holds the run")
        assert "the run has it already; name a step above 5" in cli(*words, code=1).err
        assert first.wait(60) == 0
    assert list(cli.steps()) == ["5@1"]


def test_forget_is_refused_beside_a_living_trainer(
    make_cli: MakeCli, train: Callable[[Cli], Trainer], tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={"shared": True})
    with tierfall.open(cli.config) as ckpt:
        ckpt.restore(blank())
        ckpt.save(1, state_of(1), block=True)
    trainer = train(cli)
    before = files_below(tmp_path)
    refused = cli("forget", "far", code=1)
    assert "forget: a trainer owns run 'run' (process " in refused.err
    assert "nothing was changed" in refused.err
    assert files_below(tmp_path) == before
    trainer.close()
    assert "far is forgotten by disk, this machine" in cli("forget", "far").out
