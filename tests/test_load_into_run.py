"""``Checkpointer.load`` returns a checkpoint as a dict, and the run goes on from it; ``begin`` begins without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import Opener, close_all
from tests.steps import state_of, step_in
from tierfall.config import Config
from tierfall.core.format.catalog import Listing
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import ConfigError, RestoreError, StepError, UnreachableError
from tierfall.tiers.stored import StoredTier

MakeConfig = Callable[..., dict[str, Any]]
IMAGE = "rank-00000-of-00001.safetensors"


@pytest.fixture
def config(make_config: MakeConfig) -> dict[str, Any]:
    """A run with steps 1, 2 and 3; 2 is on disk alone, the others are nowhere after a close."""
    config = make_config(disk={"retain": {"last": 9}}, far={"flush": {"every": 2}})
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
    return config


def load(ckpt: tierfall.Checkpointer, *args: Any, **more: Any) -> tuple[Any, dict[str, Any]]:
    found = ckpt.load(*args, **more)
    assert found is not None
    return found


def break_image(root: Path, step: int, attempt: int = 1) -> None:
    image = root / "run" / f"step-{step:08d}-a{attempt:04d}" / IMAGE
    image.write_bytes(image.read_bytes()[:-100] + bytes(100))


def test_a_damaged_copy_gives_way_and_a_damaged_step_to_an_older_one(
    config: dict[str, Any], tmp_path: Path
) -> None:
    for root, step in (("disk", 3), ("disk", 2)):
        break_image(tmp_path / root, step)
    with tierfall.open(config) as ckpt:
        report, loaded = load(ckpt)
        assert (report.step, step_in(loaded)) == (2, 2)
        assert [source.tier for source in report.sources][-1] == "far"
        assert any("step 3@1" in fallback.what for fallback in report.fallbacks)
        with pytest.raises(RestoreError, match="3@1") as raised:
            ckpt.load(3)
        assert "HALF FILLED" not in str(raised.value), "no state was touched"
        ckpt.save(4, state_of(4), block=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step": 9}, RestoreError, r"load: there is no checkpoint of step 9 .*3@1"),
        ({"step": "3"}, StepError, "load: step must be an integer"),
        ({"attempt": 2}, RestoreError, "of attempt 2"),
        ({"map_location": "gpu"}, ConfigError, "is not a device that can be used here"),
        ({"only": "w"}, RestoreError, "must be a list of names"),
    ],
)
def test_what_cannot_be_is_reported(
    config: dict[str, Any], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with tierfall.open(config) as ckpt, pytest.raises(error, match=message):
        ckpt.load(**arguments)


@pytest.mark.parametrize("call", ["load", "begin"])
def test_state_dicts_are_no_omission_of_a_run_that_loads(
    make_config: MakeConfig, state: dict[str, Any], caplog: pytest.LogCaptureFixture, call: str
) -> None:
    with tierfall.open(make_config()) as ckpt:
        assert getattr(ckpt, call)() is None
        ckpt.save(1, {"optimizer": state["optimizer"].state_dict()}, block=True)
        assert "refuses to fill" not in caplog.text
        assert load(ckpt)[1]["optimizer"]["state"].keys() == {0, 1, 2, 3}


# Several ranks -------------------------------------------------------------------------------------------


class Shared(Opener):
    """Both ranks see one folder."""

    def config(self, rank: int, **more: Any) -> Config:
        tiers = super().config(rank).model_dump(mode="json", exclude_unset=True)["tiers"]
        shared = {"name": "pfs", "kind": "file", "path": str(self.folder / "pfs"), "shared": True}
        return super().config(rank, tiers=[tiers[0], shared], **more)


def ranks_save(both: list[Any]) -> None:
    for rank, ckpt in enumerate(both):
        ckpt.save(1, {"w": torch.full((4,), float(rank)), "rank": rank, "all": "same"})
    on_all([c.drain for c in both])


def test_each_rank_gets_its_own_values(ranks: list[Ranks], tmp_path: Path) -> None:
    both = Opener(tmp_path, ranks).all_open()
    assert on_all([c.load for c in both]) == [None, None]
    ranks_save(both)
    found = on_all([c.load for c in both])
    assert [loaded["rank"] for _, loaded in found] == [0, 1]
    assert [loaded["w"][0].item() for _, loaded in found] == [0.0, 1.0]
    for ckpt in both:
        ckpt.save(2, {"w": torch.zeros(4)})
    close_all(both)
    config = Opener(tmp_path, ranks).config(0)
    with network(["a"]) as alone:
        # One rank on the first node: of the other rank's image nothing is needed where ranks agree.
        ckpt = tierfall.Checkpointer(config, run="run", ranks=alone[0])
        with pytest.raises(RestoreError):
            ckpt.load()
        ckpt.close()


def test_another_number_of_ranks_gets_the_values_of_rank_0(
    ranks: list[Ranks], tmp_path: Path
) -> None:
    both = Shared(tmp_path, ranks).all_open()
    on_all([c.load for c in both])
    ranks_save(both)
    close_all(both)
    with tierfall.open(Shared(tmp_path, ranks).config(0)) as ckpt:
        _, loaded = load(ckpt)
        assert (loaded["rank"], loaded["w"][0].item(), loaded["all"]) == (0, 0.0, "same")
        ckpt.save(2, {"w": torch.zeros(4)}, block=True)


def test_ranks_that_load_other_steps_are_told(ranks: list[Ranks], tmp_path: Path) -> None:
    both = Opener(tmp_path, ranks).all_open()
    on_all([c.load for c in both])
    ranks_save(both)
    errors = on_all([lambda: both[0].load(1), lambda: both[1].load()])
    assert all("step" in str(error) and "rank 1" in str(error) for error in errors), errors
    close_all(both)


# begin ---------------------------------------------------------------------------------------------------


def test_a_run_one_of_whose_tiers_is_silent_does_not_begin(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may be there is not nothing."""
    real = StoredTier.list

    def silent(store: StoredTier) -> Listing:
        if store.name == "disk":
            raise UnreachableError("disk: nobody answers")
        return real(store)

    monkeypatch.setattr(StoredTier, "list", silent)
    with tierfall.open(config) as ckpt, pytest.raises(RestoreError, match="begin: tier disk could"):
        ckpt.begin()


def test_all_ranks_begin_or_none(ranks: list[Ranks], tmp_path: Path) -> None:
    opener = Opener(tmp_path, ranks)
    close_all(opener.all_open())
    with network(["a", "b"]) as again:
        both = Opener(tmp_path, again).all_open()
        assert on_all([c.begin for c in both]) == [None, None]
        ranks_save(both)
        close_all(both)
    with network(["a", "b"]) as again:
        both = Opener(tmp_path, again).all_open()
        errors = on_all([c.begin for c in both])
        assert all(isinstance(error, StepError) for error in errors), errors
        close_all(both)
