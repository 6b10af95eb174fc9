"""NaN and Inf in a checkpoint are noted with it, a restore goes back to a step without, and no rule deletes that."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierfall
from tests.contract import of_ranks
from tests.contract.kit import Crew, Log, Place, flip, folder_of, training_state

NAN, INF = float("nan"), float("inf")
WEIGHT = "model.0.weight"


def spoil(state: dict[str, Any], value: float = NAN) -> None:
    with torch.no_grad():
        state["model"][0].weight.fill_(value)


def save(
    place: Place, *steps: int, bad: tuple[int, ...] = (), restore: Any = None, **words: Any
) -> list[tierfall.CheckpointInfo]:
    """One start: restore, save these steps, the ``bad`` ones with NaN in a weight; what there is then."""
    with place.open() as ckpt:
        state = training_state()
        ckpt.restore(state, **(restore or {}))
        for step in steps:
            if step in bad:
                spoil(state)
            ckpt.save(step, state, block=True, **words)
        return list(ckpt.checkpoints())


def restored(place: Place, **how: Any) -> tierfall.RestoreReport:
    with place.open() as ckpt:
        report = ckpt.restore(training_state(), **how)
    assert report is not None
    return report


def on_disk(place: Place) -> list[int]:
    return [c["step"] for c in place.json("ls")["checkpoints"] if "disk" in c["copies"]]


def test_a_restore_goes_back_to_the_newest_step_without_nan_and_says_so(
    place: Place, log: Log
) -> None:
    place.config()
    infos = save(place, 1, 2, 3, 4, bad=(3, 4))
    noted = {1: (), 2: (), 3: (WEIGHT,), 4: (WEIGHT,)}
    assert {info.step: info.not_finite for info in infos} == noted
    assert {c["step"]: tuple(c["not_finite"]) for c in place.json("ls")["checkpoints"]} == noted
    listed = place.cli("ls").out
    assert f"NaN or Inf in {WEIGHT}" in listed
    assert "if the process dies: 2@1 is left" in listed, "where a restart continues"
    assert f"NaN or Inf in {WEIGHT}" in place.cli("show", "4").out
    assert tierfall.load(place.yaml)["model"]["0.weight"].isfinite().all()
    report = restored(place)
    assert report.step == 2
    assert [f.id.step for f in report.fallbacks if f.id and WEIGHT in f.reason] == [4, 3]
    log.wait(rf"passes over step 4@1, 3@1, with .*{WEIGHT}, and takes step 2@1.*step=4")
    assert restored(place, step=4).step == 4, "what is named is taken"
    log.wait(rf"restore: step 4@1 has NaN or Inf in {WEIGHT}")


def test_a_loss_that_is_nan_counts_as_well(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        ckpt.save(1, training_state(), metrics={"train/loss": torch.tensor(2.0)}, block=True)
        ckpt.save(2, training_state(), metrics={"train/loss": torch.tensor(NAN)}, block=True)
        assert ckpt.checkpoints()[-1].not_finite == ("metrics.train/loss",)
    assert restored(place).step == 1


def test_without_an_older_good_step_the_newest_is_taken(place: Place, log: Log) -> None:
    place.config()
    save(place, 1, 2, bad=(1, 2))
    assert restored(place).step == 2
    log.wait(rf"restore: step 2@1 has NaN or Inf in {WEIGHT}")


def test_if_the_good_step_is_damaged_the_newest_is_taken_and_reported(
    place: Place, log: Log
) -> None:
    place.config()
    save(place, 1, 2, bad=(2,))
    shutil.rmtree(place.memory)
    flip(next(folder_of(place, 1).glob("*.safetensors")))
    report = restored(place)
    assert (report.step, report.fallbacks) == (2, ())
    log.wait(rf"restore: step 2@1 has NaN or Inf in {WEIGHT}")


def test_no_rule_deletes_the_good_step_while_all_newer_ones_are_bad(place: Place) -> None:
    place.config(disk={"retain": {"last": 1}})
    save(place, 1, 2, 3, 4, 5, bad=(3, 4, 5))
    assert on_disk(place) == [2, 5]
    reasons = place.json("show", "2")["copies"]["disk"]["decision"]
    assert WEIGHT in reasons["reason"], reasons
    place.cli("prune", "--yes", code=-1)
    assert on_disk(place) == [2, 5]
    save(place, 6, 7, restore={"step": 5})
    assert on_disk(place) == [2, 7], "also once a training has gone on with NaN"
    save(place, 3, 4, restore={"step": 2})
    assert on_disk(place) == [4], "the good one is needed no more"


def test_a_tier_with_room_for_two_takes_each_start_that_goes_bad_again(place: Place) -> None:
    place.config()
    (info,) = save(place, 1)
    place.config(disk={"capacity": int(2.5 * info.bytes)})
    for _ in range(3):  # a copy that finds no room raises
        save(place, 2, bad=(2,))
    assert restored(place).step == 1


def test_a_tier_with_room_for_two_takes_each_save_of_a_training_that_goes_on_with_nan(
    place: Place,
) -> None:
    place.config()
    (info,) = save(place, 1)
    place.config(disk={"capacity": int(2.5 * info.bytes)})
    save(place, 2, 3, 4, bad=(2, 3, 4))  # a copy that finds no room raises
    assert restored(place).step == 1
    save(place, 5, 6, restore={"step": 4})
    assert restored(place).step == 6, "step 4 was accepted"


class Masked(nn.Module):
    """A mask of -inf, a history and a buffer that nobody has written, a frozen table and quantized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((8, 8), -INF).triu(1))
        self.register_buffer("amax", torch.full((16,), NAN))
        self.table = nn.Parameter(torch.full((64,), -INF), requires_grad=False)
        self.packed = nn.Parameter(torch.full((64,), 127, dtype=torch.int8), requires_grad=False)
        self.fp8 = nn.Parameter(torch.full((64,), NAN).to(torch.float8_e4m3fn))


def masked() -> dict[str, Any]:
    return {"model": Masked()}


def scaled() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=INF)
    return {**training_state(), "scaler": scaler, "scale": torch.tensor(INF), "bias": [NAN]}


def moments() -> dict[str, Any]:
    state = training_state()
    for each in state["optimizer"].state.values():
        each["exp_avg_sq"].fill_(INF)
    return state


@pytest.mark.parametrize("make", [masked, scaled, moments])
def test_a_training_that_is_well_may_hold_inf_and_nan(
    place: Place, make: Callable[[], dict[str, Any]]
) -> None:
    place.config()
    with place.open() as ckpt:
        ckpt.save(1, make(), metrics={"loss": 1.0}, block=True)
        metrics = {"best_loss": INF, "val_loss": NAN, "eval/loss": NAN, "lr": INF, "loss": 1.0}
        ckpt.save(2, make(), metrics=metrics, block=True)
        assert [info.not_finite for info in ckpt.checkpoints()] == [(), ()]


def test_what_every_step_has_and_what_a_person_went_on_from_is_no_reason_to_go_back(
    place: Place,
) -> None:
    """A loss of inf at the first step, and a trained parameter that some change has made infinite on purpose."""
    place.config()
    with place.open() as ckpt:
        state = training_state()
        ckpt.save(0, state, metrics={"loss": INF}, block=True)
        ckpt.save(1, state, metrics={"loss": INF}, block=True)
    assert restored(place).step == 1
    save(place, 2)
    save(place, 3, 4, bad=(3, 4))
    assert restored(place).step == 2
    save(place, 5, restore={"step": 4})
    assert restored(place).step == 5, "whoever went on from step 4 has accepted it"
    save(place, 6, restore={"step": 4}, metrics={"loss": NAN})
    assert restored(place).step == 4, "what has gone bad since leads back there, and no further"


def test_the_third_restore_of_a_step_is_reported_with_the_way_back(place: Place, log: Log) -> None:
    place.config()
    save(place, 1, 2)
    save(place)
    save(place, 3, bad=(3,))
    assert not log.lines("restore number")
    assert restored(place).step == 2
    log.wait(r"restore number 3 of step 2@1.*go back: restore\(step=1\)")


def test_nan_on_one_rank_counts_for_all(four: Crew, tmp_path: Path) -> None:
    """Rank 3 is on another node, whose disk alone has its image."""
    four.nodes = [0, 0, 1, 1]
    found = four.run(of_ranks.gone_bad, folder=str(tmp_path), steps=[1, 2], bad=2, on=3)
    assert found == [[None, {"1": [], "2": ["part3.weight"]}]] * 4
    for node in (0, 1):
        found = four.run(of_ranks.gone_bad, folder=str(tmp_path), steps=[], bad=2, on=3)
        assert found == [[1, {"1": [], "2": ["part3.weight"]}]] * 4
        shutil.rmtree(tmp_path / f"memory-{node}", ignore_errors=True)
