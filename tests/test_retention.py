"""Retention of whole runs: checkpoints with metrics and tags are kept by them, on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import SOON_S, Opener, close_all, kill_all, restore_all, wait_sealed
from tests.rank_kit import config_of
from tests.steps import blank, state_of, wait_until
from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import Config
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types import keys
from tierfall.core.types.errors import UnreachableError
from tierfall.run.checkpointer import Checkpointer

MakeConfig = Callable[..., dict[str, Any]]
LOSSES = {1: 0.9, 2: 0.2, 3: 0.5, 4: 0.2, 5: 0.8, 6: 0.7}
RULES = {"last": 1, "best": {"metric": "loss", "count": 2}, "tags": ["release"]}


def steps_on(folder: Path) -> list[int]:
    found = (keys.parse_step_folder(path.name) for path in (folder / "run").iterdir())
    return sorted(id.step for id in found if id is not None)


def save_all(config: dict[str, Any]) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        for step, loss in LOSSES.items():
            tags = ["release"] if step == 3 else []
            metrics = {"loss": torch.tensor(loss)}
            ckpt.save(step, state_of(step), metrics=metrics, tags=tags, block=True)


def test_what_the_union_of_the_rules_wants_stays(make_config: MakeConfig, tmp_path: Path) -> None:
    save_all(make_config(disk={"retain": RULES}))
    assert steps_on(tmp_path / "disk") == [2, 3, 4, 6]


def test_metrics_and_tags_of_an_earlier_start_count(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    save_all(make_config(disk={}))
    assert steps_on(tmp_path / "disk") == sorted(LOSSES)
    with tierfall.open(make_config(disk={"retain": RULES})) as ckpt:
        ckpt.restore(blank())
        reasons = {d.checkpoint.step: d.reason for d in ckpt.prune(dry_run=True)}
        ckpt.prune()
    assert steps_on(tmp_path / "disk") == [2, 3, 4, 6]
    assert reasons[2] == "best loss 2 of 2"
    assert reasons[3] == "tagged release"
    assert reasons[4] == "best loss 1 of 2"


NEAREST = 'they have accuracy, loss; did you mean "loss"?'


@pytest.mark.parametrize(
    ("metrics", "saves", "said"),
    [
        ({"loss": 0.5, "accuracy": 0.9}, 1, [NEAREST]),
        ({"loss": 0.5, "accuracy": 0.9}, 5, [NEAREST]),
        ({}, 2, []),
        ({}, 5, ["nor any other; save takes them as metrics={...}"]),
        ({"los": 0.5}, 5, []),
    ],
)
def test_a_metric_that_no_save_gives_is_reported_once_and_harms_nothing(
    metrics: dict[str, float],
    saves: int,
    said: list[str],
    make_config: MakeConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    retain = {"last": 1, "best": {"metric": "los"}}
    with tierfall.open(make_config(disk={"retain": retain})) as ckpt:
        for step in range(1, saves + 1):
            ckpt.save(step, state_of(step), metrics=metrics, block=True)
    warned = [r for r in caplog.records if "no checkpoint has" in r.message]
    assert [r.levelname for r in warned] == ["WARNING"] * len(said)
    assert all(text in r.message for text, r in zip(said, warned, strict=True))
    assert steps_on(tmp_path / "disk")[-1] == saves


def test_a_metric_that_an_earlier_start_gave_is_not_missed(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(disk={"retain": RULES})
    save_all(config)
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        ckpt.save(7, state_of(7), metrics={"accuracy": 0.5}, block=True)
    assert "no checkpoint has" not in caplog.text


def test_a_time_counts_from_when_a_step_was_saved(make_config: MakeConfig, tmp_path: Path) -> None:
    save_all(make_config(disk={}))
    for retain, left in (({"for": "30d"}, sorted(LOSSES)), ({"for": "1ms"}, [5, 6])):
        with tierfall.open(make_config(disk={"retain": retain})) as ckpt:
            ckpt.restore(blank())
            ckpt.prune()
        assert steps_on(tmp_path / "disk") == left


def test_a_copy_leaves_by_time_while_the_trainer_waits(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config(disk={"retain": {"for": "1500ms"}})) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
        wait_until(lambda: steps_on(tmp_path / "disk") == [2, 3], "the oldest goes", 20.0)


# Several ranks ---------------------------------------------------------------------------------------


def test_rank_0s_metrics_decide_for_all(tmp_path: Path) -> None:
    """Rank 1 measured otherwise: by its losses, other steps would be the best."""
    config = config_of(tmp_path, shared={"retain": {"best": {"metric": "loss", "count": 2}}})
    with network(["a", "a"]) as ranks:
        opened = on_all([lambda r=r: Checkpointer(config, run="run", ranks=r) for r in ranks])  # type: ignore[misc]
        for step, loss in LOSSES.items():
            saves = [
                lambda c=ckpt, m=measured, s=step: c.save(  # type: ignore[misc]
                    s, {"w": torch.ones(4), "rng": None}, metrics={"loss": m}
                )
                for ckpt, measured in zip(opened, (loss, -loss), strict=True)
            ]
            for handle in on_all(saves):
                handle.wait("shared", timeout=SOON_S)
        assert on_all([one.close for one in opened]) == [None, None]
    assert steps_on(tmp_path / "shared") == [2, 4, 6]


@pytest.mark.parametrize(("given", "times"), [(("other", "loss"), 1), (("loss", "other"), 0)])
def test_of_several_ranks_rank_0_says_what_it_was_not_given(
    given: tuple[str, str], times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, shared={"retain": {"last": 1, "best": {"metric": "loss"}}})
    with network(["a", "a"]) as ranks:
        opened = on_all([lambda r=r: Checkpointer(config, run="run", ranks=r) for r in ranks])  # type: ignore[misc]
        for step in (1, 2):
            saves = [
                lambda c=ckpt, m=metric, s=step: c.save(  # type: ignore[misc]
                    s, {"w": torch.ones(4), "rng": None}, metrics={m: 1.0}
                )
                for ckpt, metric in zip(opened, given, strict=True)
            ]
            for handle in on_all(saves):
                handle.wait("shared", timeout=SOON_S)
        assert on_all([one.close for one in opened]) == [None, None]
    assert len([r for r in caplog.records if "they have other" in r.message]) == times


class Sparing(Opener):
    """Ranks whose tiers keep the newest and the best."""

    def config(self, rank: int, **more: Any) -> Config:
        document = super().config(rank, **more).model_dump()
        document["tiers"][0]["capacity"] = "4MiB"
        for tier in document["tiers"][1:]:
            tier["retain"] = {"last": 1, "best": {"metric": "loss"}}
        return Config.model_validate(document)


def test_ranks_that_measured_otherwise_agree_on_what_is_still_flushed(
    tmp_path: Path, ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has three steps that no tier has got; which of the older two is the best, each rank sees otherwise."""
    opener = Sparing(tmp_path, ranks)
    real = PosixBackend.create

    def create(self: PosixBackend, key: str, **options: Any) -> Any:
        if not key.endswith(".safetensors"):
            return real(self, key, **options)
        raise UnreachableError(f"{key}: nobody answers")

    with monkeypatch.context() as context:
        context.setattr(PosixBackend, "create", create)
        both = opener.all_open()
        for step in (1, 2, 3):
            for rank, ckpt in enumerate(both):
                loss = float(step if rank == 0 else -step)
                state = {"w": torch.full((4,), float(rank)), "rng": None}
                ckpt.save(step, state, metrics={"loss": loss}).captured(SOON_S)
        wait_sealed(both)
        kill_all(both)
    with network(["a", "b"]) as again:
        both = Sparing(tmp_path, again).all_open()
        restore_all(both, [{"w": torch.zeros(4), "rng": None} for _ in both])
        reports = on_all([lambda c=c: c.drain(SOON_S) for c in both])  # type: ignore[misc]
        assert [report.left for report in reports] == [(), ()]
        close_all(both)
    for rank in (0, 1):
        assert steps_on(tmp_path / str(rank) / "far") == [1, 3]
