"""``drain``: images that a dead trainer left in memory become durable, or stay there with a report; fencing holds."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, Trainer

import tierfall
from tests.memory_store import MemoryStore
from tests.steps import blank, files_below, state_of, step_in, steps_on
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.format.records import Attempt
from tierfall.tiers.stored import StoredTier

MakeCli = Callable[..., Cli]
Train = Callable[[Cli], Trainer]
CRAWL = "4kB/s"


def crawling(make_cli: MakeCli, crawl: str | None = CRAWL) -> Cli:
    """A chain whose far tier takes copies so slowly that none arrives before the trainer dies."""
    return make_cli(disk={"flush": {"every": 2}}, far={"bandwidth": crawl}, max_wait="5s")


def die(trainer: Trainer, *steps: int) -> None:
    """Let a trainer die with these steps in memory."""
    for step in steps:
        trainer.tell(f"capture {step}")
    trainer.kill()


def newer_attempt(root: Path, *, number: int, node: str, pid: int) -> None:
    store = StoredTier(name=root.name, run="run", backend=PosixBackend(root))
    store.create_attempt(
        Attempt(run="run", number=number, id="f" * 32, node=node, pid=pid, wall_time_s=1.0)
    )
    store.close()


def arenas(memory: Path) -> list[Path]:
    return list(memory.rglob("*.arena"))


def test_a_tier_that_refuses_is_tried_until_the_deadline(
    make_cli: MakeCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore(monkeypatch)
    cli = make_cli(max_wait="1s")
    cli.configure({**cli.config, "tiers": [cli.config["tiers"][0], store.tier()]})
    store.refuse = lambda call, key: PermissionError() if "step-00000002" in key else None
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.save(2, state_of(2))
    assert store.steps() == [1]
    store.heal_after_refusals(5)
    cli("drain", "--deadline", "60s")
    assert store.steps() == [1, 2]


def test_a_tier_that_cannot_be_opened_is_tried_until_the_deadline(
    make_cli: MakeCli,
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cli = crawling(make_cli)
    die(train(cli), 1, 2)
    cli.configure(crawling(make_cli, None).config)
    real, far = os.open, os.stat(tmp_path / "far")

    def refuse(path: Any, flags: int, *rest: Any, dir_fd: int | None = None) -> int:
        is_far = dir_fd is not None and os.path.samestat(os.fstat(dir_fd), far)
        if is_far and flags & os.O_ACCMODE and "goes on without tier far" not in caplog.text:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    document = cli.json("drain", "--deadline", "60s")
    assert "goes on without tier far" in caplog.text, "it could not be opened at first"
    assert {(one["step"], one["tier"]) for one in document["done"]} == {
        (2, "disk"),
        (1, "far"),
        (2, "far"),
    }
    assert (document["left"], document["memory_kept"]) == ([], False)
    assert (steps_on(tmp_path / "disk"), steps_on(tmp_path / "far")) == ([2], [1, 2])


def test_what_a_dead_trainer_left_is_made_durable_and_memory_is_given_back(
    make_cli: MakeCli, train: Train, tmp_path: Path, memory: Path
) -> None:
    cli = crawling(make_cli)
    die(train(cli), 1, 2)
    assert {step: copies["host"] for step, copies in cli.steps().items()} == {
        "1@1": "sealed",
        "2@1": "sealed",
    }
    slow = cli.json("drain", "--deadline", "1s", code=1)
    assert {(one["step"], one["tier"]) for one in slow["left"]} >= {(2, "far")}
    assert slow["memory_kept"]
    assert arenas(memory)
    cli.configure(crawling(make_cli, None).config)
    document = cli.json("drain")
    moved = {(one["step"], one["tier"]) for part in (slow, document) for one in part["done"]}
    assert moved == {(1, "far"), (2, "far"), (2, "disk")}
    assert (document["left"], document["memory_kept"]) == ([], False)
    assert arenas(memory) == []
    assert (steps_on(tmp_path / "disk"), steps_on(tmp_path / "far")) == ([2], [1, 2])
    assert cli("drain").out == "run run: nothing is in host memory\n"
    with tierfall.open(cli.config) as ckpt:
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert (report.attempt, step_in(state)) == (1, 2)


def test_it_says_what_it_did(make_cli: MakeCli, train: Train) -> None:
    cli = crawling(make_cli)
    die(train(cli), 1)
    answer = cli("drain", "--deadline", "500ms", code=1)
    assert answer.out.splitlines()[-1] == "host memory is kept"
    assert "drain: not done: 1@1 to far (" in answer.err
    assert "in at most 500 ms step 1@1 " in answer.err
    cli.configure(crawling(make_cli, None).config)
    first, summary, memory = cli("drain").out.splitlines()
    assert first.startswith("flushed 1@1 to far (")
    assert summary.startswith("run run: 1 of 1 copy made durable, ")
    assert memory == "host memory is freed"


def test_what_no_tier_is_owed_is_not_called_durable(
    make_cli: MakeCli, train: Train, tmp_path: Path
) -> None:
    cli = make_cli(far={"flush": {"every": 20}})
    die(train(cli), 1)
    owed, memory = cli("drain").out.splitlines()
    assert owed == (
        "run run: by flush of the tiers none is owed what is in memory; with every: 1 it is flushed"
    )
    assert memory == "host memory is kept"
    cli.configure(make_cli(far={"flush": {"every": 1}}).config)
    assert "flushed 1@1 to far" in cli("drain").out
    assert steps_on(tmp_path / "far") == [1]


def test_memory_that_is_to_be_kept_is_kept_and_nothing_is_called_unflushed(
    make_cli: MakeCli, train: Train
) -> None:
    cli = make_cli(host={"on_close": "keep"})
    die(train(cli), 1)
    assert cli("drain").out.splitlines()[-1] == "host memory is kept (on_close: keep)"
    owed, memory = cli("drain").out.splitlines()
    assert owed == "run run: no tier is owed what is in memory"
    assert memory == "host memory is kept (on_close: keep)"


def test_with_a_deadline_it_foretells_what_comes_and_brings_the_newest_first(
    make_cli: MakeCli, train: Train, tmp_path: Path
) -> None:
    cli = crawling(make_cli)
    die(train(cli), 1, 2, 3, 4)
    cli.configure(crawling(make_cli, "100kB/s").config)  # an image takes more than a second
    document = cli.json("drain", "--deadline", "5s", code=1)
    steps = [one["step"] for one in document["done"] if one["tier"] == "far"]
    assert max(steps) == 4
    assert steps == list(range(min(steps), 5)), "the newest came before what was older"
    assert min(steps) > 1
    unknown, messages = document["forecast"][:4], document["forecast"][4:]
    assert all("the rate of far is not known yet" in line for line in unknown)
    assert any("not be on far" in line and " carry " in line for line in messages), messages
    assert steps_on(tmp_path / "far") == sorted(steps)


def test_nothing_is_written_where_a_newer_attempt_exists_elsewhere(
    make_cli: MakeCli, train: Train, tmp_path: Path, memory: Path
) -> None:
    cli = crawling(make_cli)
    die(train(cli), 1)
    newer_attempt(tmp_path / "disk", number=2, node="another-node", pid=1)
    cli.configure(crawling(make_cli, None).config)
    before = files_below(tmp_path), files_below(memory)
    answer = cli("drain", code=1)
    assert (
        "attempt 1 of run 'run' was followed by attempt 2 (process 1 on another-node)" in answer.err
    )
    after = files_below(tmp_path), files_below(memory)
    assert after[0] == before[0]
    assert [name for name in before[1] if name.endswith(".arena")] == [
        name for name in after[1] if name.endswith(".arena")
    ]


def test_a_newer_attempt_of_a_living_process_here_is_a_fence_too(
    make_cli: MakeCli, train: Train, tmp_path: Path
) -> None:
    """It may train by another folder for its memory, as in another container."""
    from socket import gethostname

    cli = crawling(make_cli)
    die(train(cli), 1)
    newer_attempt(tmp_path / "far", number=2, node=gethostname(), pid=os.getpid())
    before = files_below(tmp_path)
    assert "followed by attempt 2" in cli("drain", code=1).err
    assert files_below(tmp_path) == before


def test_what_survived_two_deaths_is_drained(
    make_cli: MakeCli, train: Train, tmp_path: Path, memory: Path
) -> None:
    """The second trainer took a new attempt, adopted what it found, and died before it had saved anything."""
    cli = crawling(make_cli)
    die(train(cli), 1)
    again = train(cli)
    assert again.restored == 1
    again.kill()
    cli.configure(crawling(make_cli, None).config)
    assert cli.json("drain")["left"] == []
    assert steps_on(tmp_path / "far") == [1]
    assert arenas(memory) == []


def test_a_run_without_anything_in_memory_has_nothing_to_drain(
    make_cli: MakeCli, tmp_path: Path, memory: Path
) -> None:
    cli = make_cli()
    nothing = {"run": "run", "done": [], "left": [], "memory_kept": False}
    assert cli.json("drain") == {**nothing, "ok": True, "problems": []}
    assert files_below(memory) == {}
    assert not (tmp_path / "disk").exists()
    (tmp_path / "disk").mkdir()
    assert cli.json("drain") == {**nothing, "ok": True, "problems": []}
    assert files_below(memory) == {}


def test_what_tiers_wait_for_from_another_tier_is_reported_and_left_to_the_next_start(
    make_cli: MakeCli, tmp_path: Path, memory: Path
) -> None:
    cli = make_cli(disk={})
    with tierfall.open(cli.config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
    cli.configure(make_cli(disk={}, far={}).config)
    (tmp_path / "far").mkdir()
    nothing, first, second, why = cli("drain").out.splitlines()
    assert nothing == "run run: nothing is in host memory"
    assert first.startswith("still owed from another tier: 1@1 to far (")
    assert second.startswith("still owed from another tier: 2@1 to far (")
    assert why == (
        "drain flushes only what is in memory: the next start of the trainer makes those 2 copies"
    )
    assert [(one["step"], one["tier"]) for one in cli.json("drain")["left"]] == [
        (1, "far"),
        (2, "far"),
    ]
    assert list((tmp_path / "far").iterdir()) == []
    with tierfall.open(cli.config) as ckpt:
        ckpt.restore(blank())
        ckpt.drain()
    assert cli("drain").out == "run run: nothing is in host memory\n"
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    answer = cli("drain", code=1)
    assert answer.out == "run run: nothing is in host memory\n", "far may hold all of it"
    assert "tier far could not be read" in answer.err


@pytest.mark.parametrize("deadline", ["soon", "10x", ""])
def test_a_deadline_that_is_none_is_a_usage_error(make_cli: MakeCli, deadline: str) -> None:
    assert "--deadline: " in make_cli()("drain", "--deadline", deadline, code=2).err
