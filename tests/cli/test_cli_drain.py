"""``drain``: images that a dead trainer left in memory become durable, or stay there with a report; fencing holds."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, Trainer

import tierfall
from tests.memory_store import MemoryStore
from tests.steps import files_below, state_of, steps_on
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
