"""``load`` beside a trainer that deletes checkpoints loads the newest one by then. If a step was named, the error says
that no copy of it is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import close_all, restore_all
from tests.shelf import Shelf
from tests.steps import blank, state_of, step_in, wait_until
from tierfall.config import Config
from tierfall.core.ranks.ranks import Ranks
from tierfall.errors import RestoreError
from tierfall.run.checkpointer import Checkpointer

MakeConfig = Callable[..., dict[str, Any]]
Loading = tuple[dict[str, Any], tierfall.Checkpointer, Shelf]


@pytest.fixture
def training(
    make_config: MakeConfig, shelf: Shelf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loading]:
    """A trainer that keeps one checkpoint, and the configuration of a job on another node that loads."""
    config = make_config()
    config["tiers"][1] = {
        "name": "store", "kind": "object", "url": "shelf://a", "retain": {"last": 1}
    }  # fmt: skip
    elsewhere = {"name": "host", "kind": "host", "folder": str(tmp_path_factory.mktemp("m"))}
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        yield {**config, "tiers": [elsewhere, config["tiers"][1]]}, ckpt, shelf


def once_read(shelf: Shelf, what: str, then: Callable[[], object]) -> None:
    """Call ``then`` before a key with ``what`` in it is read for the first time."""
    left = [then]

    def on_read(key: str) -> None:
        if what in key and left:
            left.pop()()

    shelf.on_read = on_read


def save_and_delete(ckpt: tierfall.Checkpointer, shelf: Shelf, step: int) -> None:
    ckpt.save(step, state_of(step), block=True)
    wait_until(lambda: shelf.steps() == [step], "the rules have deleted the one before")


@pytest.mark.parametrize("what", ["rank-00000-of-00001.json", "rank-00000-of-00001.safetensors"])
def test_what_is_newest_by_then_is_loaded(what: str, training: Loading) -> None:
    config, ckpt, shelf = training
    once_read(shelf, f"step-00000001-a0001/{what}", lambda: save_and_delete(ckpt, shelf, 2))
    assert step_in(tierfall.load(config)) == 2


def test_a_step_that_was_named_and_deleted_is_an_error(training: Loading) -> None:
    config, ckpt, shelf = training
    image = "step-00000001-a0001/rank-00000-of-00001.safetensors"
    once_read(shelf, image, lambda: save_and_delete(ckpt, shelf, 2))
    with pytest.raises(RestoreError, match=r"load of 1@1: 1@1 was deleted while it was read"):
        tierfall.load(config, step=1)


def test_ranks_choose_again_together(
    make_config: MakeConfig, shelf: Shelf, ranks: list[Ranks], tmp_path: Path
) -> None:
    """While they read step 3, a trainer commits step 4 and deletes it."""

    def open_one(ranks: list[Ranks], rank: int) -> Checkpointer:
        config = make_config(host={"folder": str(tmp_path / str(rank))})
        config["tiers"][1] = {"name": "store", "kind": "object", "url": "shelf://a"}
        return Checkpointer(Config.model_validate(config), ranks=ranks[rank])

    both = on_all([partial(open_one, ranks, rank) for rank in range(2)])
    for step in (3, 4):
        handles = [ckpt.save(step, state_of(step)) for ckpt in both]
        on_all([partial(handle.wait, "store") for handle in handles])
    close_all(both)
    latest = shelf.values["run/latest"]
    saved = {key: shelf.values.pop(key) for key in shelf.of_step(4)}
    shelf.values["run/latest"] = latest.replace(b"4", b"3", 1)

    def replace_step() -> None:
        shelf.values.update(saved, **{"run/latest": latest})
        for key in sorted(shelf.of_step(3), key=lambda key: "commit" not in key):
            del shelf.values[key]

    with network(["a", "b"]) as again:
        both = on_all([partial(open_one, again, rank) for rank in range(2)])
        once_read(shelf, "step-00000003-a0001/rank", replace_step)
        states = [blank(), blank()]
        reports = restore_all(both, states)
        assert [(report.step, report.fallbacks) for report in reports] == [(4, ())] * 2
        assert [step_in(state) for state in states] == [4, 4]
        close_all(both)
