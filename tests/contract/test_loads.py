"""A checkpoint as nested dicts: ``tierfall.load`` from every path, ``Checkpointer.load``, and pointers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.contract.faulty import Faulty
from tests.contract.kit import (
    IMAGE,
    Log,
    Place,
    equal,
    folder_of,
    new_place,
    state_of,
    step_in,
    training_state,
)
from tierfall.errors import ConfigError, IntegrityError, RestoreError, StepError, TierfallError


def files_below(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder, with its size and time."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Steps 1, 2 and 3 on disk, and 2 on far, for tests that change nothing."""
    with new_place(tmp_path_factory.mktemp("run")) as place:
        place.config(disk={}, far={"flush": {"every": 2}})
        place.save(1, 2, 3)
        yield place


@pytest.fixture
def own(run: Place, place: Place) -> Place:
    """A copy of it, to change."""
    for tier in ("disk", "far"):
        shutil.copytree(run.root / tier, place.root / tier)
    place.config(disk={}, far={"flush": {"every": 2}})
    return place


# tierfall.load ---------------------------------------------------------------------------------------


def test_every_way_to_name_a_checkpoint(run: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    root = run.root
    before, held = files_below(root), files_below(run.memory)
    newest = folder_of(run, 3)
    config = run.config(disk={}, far={"flush": {"every": 2}})
    before["tiers.yaml"] = files_below(root)["tiers.yaml"]
    for way in (
        *(config, tierfall.Config.model_validate(config), run.yaml, str(run.yaml)),
        *(root / "disk", f"{root}/disk/", root / "disk/run", newest, newest / IMAGE),
    ):
        assert step_in(tierfall.load(way)) == 3, way
    assert step_in(tierfall.load(run.yaml, step=1)) == 1
    assert step_in(tierfall.load(root / "disk", step=2)) == 2
    assert step_in(tierfall.load(root / "disk/run", step=2, attempt=1)) == 2
    assert step_in(tierfall.load(folder_of(run, 1) / IMAGE)) == 1
    assert step_in(tierfall.load(root / "far")) == 2
    monkeypatch.chdir(root)
    assert step_in(tierfall.load("disk")) == 3
    after = files_below(root)
    assert after == before, "a load changes nothing"
    assert files_below(run.memory) == held


def test_what_each_state_dict_returned_comes_back(place: Place) -> None:
    place.config()
    state = training_state(1)
    state["nested"] = {"list": [1, (2.5, None)], "tensor": torch.arange(3)}
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        found = ckpt.load()
    assert found is not None
    report, inside = found
    assert (report.step, report.attempt) == (1, 1)
    for read in (inside, tierfall.load(place.root / "disk", map_location=torch.device("cpu"))):
        assert set(read) == {*state, "rng"}
        assert equal(dict(read["model"]), dict(state["model"].state_dict()))
        assert equal(read["optimizer"], state["optimizer"].state_dict())
        assert equal(read["nested"], state["nested"])
    again = training_state(2)
    again["model"].load_state_dict(inside["model"])
    again["optimizer"].load_state_dict(inside["optimizer"])
    assert equal(again["optimizer"].state_dict(), state["optimizer"].state_dict())


def test_only_selects_parts_at_any_depth(place: Place) -> None:
    place.config()
    state = training_state(1)
    state["nested"] = {"a": torch.ones(2), "b": {"c": torch.zeros(3), "d": torch.zeros(3)}}
    state["list"] = [torch.ones(1), torch.zeros(1)]
    names = ["nested.b.c", "model.0", "list.1", "optimizer.param_groups"]
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        found = ckpt.load(only=names)
        assert found is not None
        for part in (found[1], tierfall.load(place.yaml, only=names)):
            assert sorted(part) == ["list", "model", "nested", "optimizer"]
            assert equal(part["nested"], {"b": {"c": torch.zeros(3)}})
            assert list(part["model"]) == ["0.weight", "0.bias"]
            assert len(part["list"]) == 2, "a list is returned whole"
            assert sorted(part["optimizer"]) == ["param_groups", "state"]
        for load in (ckpt.load, lambda **how: tierfall.load(place.yaml, **how)):
            with pytest.raises(RestoreError, match="modle"):
                load(only=["modle"])


def test_a_load_beside_a_living_trainer_sees_memory_and_takes_no_attempt(place: Place) -> None:
    place.config(disk={"flush": {"every": 2}})
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        assert step_in(tierfall.load(place.yaml)) == 1
        assert place.folders() == []
        ckpt.save(2, state_of(2), block=True)
        assert step_in(tierfall.load(place.yaml)) == 2
        assert ckpt.save(3, state_of(3)).attempt == 1
    assert len([*(place.root / "disk/run/attempts").iterdir()]) == 1


def test_an_abandoned_step_is_loaded_by_step_and_attempt_only(own: Place) -> None:
    with own.open() as ckpt:
        ckpt.pin(3)
        ckpt.restore(state_of(0), step=2)
        ckpt.save(4, state_of(4), block=True)
    assert step_in(tierfall.load(own.yaml)) == 4
    assert step_in(tierfall.load(own.yaml, step=3, attempt=1)) == 3
    assert step_in(tierfall.load(folder_of(own, 3))) == 3
    with pytest.raises(RestoreError, match="abandoned"):
        tierfall.load(own.yaml, step=3)


def test_a_damaged_shard_is_read_from_the_next_tier_if_the_configuration_names_one(
    own: Place,
) -> None:
    shard = folder_of(own, 2) / IMAGE
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    assert step_in(tierfall.load(own.yaml, step=2)) == 2
    with pytest.raises(RestoreError, match="damaged"):
        tierfall.load(shard)
    (folder_of(own, 3) / IMAGE).unlink()
    assert step_in(tierfall.load(own.yaml)) == 2, (
        "an older step if the newest is damaged everywhere"
    )


def test_what_may_not_be_read_is_an_error_and_no_older_step(place: Place, store: Faulty) -> None:
    place.config(store=store.tier())
    place.save(1, 2)
    store.set("deny", "step-00000002-a0001/rank")
    with pytest.raises(RestoreError, match="2@1"):
        tierfall.load(place.yaml)
    assert step_in(tierfall.load(place.yaml, step=1)) == 1


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere", "does not exist"),
        ("disk/run/latest", "not a shard"),
        ("disk/run/attempts", "no run"),
        (".", "no run"),
    ],
)
def test_a_path_that_leads_to_no_checkpoint_says_what_was_expected(
    run: Place, path: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        tierfall.load(run.root / path)


def test_a_copied_step_loads_below_a_folder_of_its_runs_name_only(
    run: Place, tmp_path: Path
) -> None:
    step = folder_of(run, 3)
    for place in ("sc/step-00000003-a0001", "run/step-00000009-a0001", "my copy"):
        copied = tmp_path / "copies" / place
        shutil.copytree(step, copied)
        with pytest.raises(TierfallError, match=r"run/step-0+3-a0001"):
            tierfall.load(copied)
    home = tmp_path / "home" / "run" / step.name
    shutil.copytree(step, home)
    assert step_in(tierfall.load(home)) == step_in(tierfall.load(home / IMAGE)) == 3
    lone = tmp_path / "lone" / IMAGE
    lone.parent.mkdir()
    shutil.copy(step / IMAGE, lone)
    with pytest.raises(ConfigError, match="safetensors"):
        tierfall.load(lone)
    renamed = tmp_path / "renamed" / "other"
    shutil.copytree(run.root / "disk" / "run", renamed)
    with pytest.raises(RestoreError, match="name it run"):
        tierfall.load(renamed)


def test_wrong_arguments_are_refused_with_what_was_expected(run: Place) -> None:
    for number in ("3", True, 1.0, [3]):
        wrong: Any = number
        with pytest.raises(StepError, match="step must be an integer"):
            tierfall.load(run.yaml, step=wrong)
        with pytest.raises(StepError, match="attempt must be an integer"):
            tierfall.load(run.yaml, step=1, attempt=wrong)
    for device in ("gpu", "cuda:99", None, {"cuda": "cpu"}):
        other: Any = device
        with pytest.raises(ConfigError, match="is not a device"):
            tierfall.load(run.yaml, map_location=other)
    for asked in ({"attempt": 9}, {"step": 2}):
        with pytest.raises(ConfigError, match="run's folder"):
            tierfall.load(folder_of(run, 3), **asked)  # type: ignore[arg-type]
    with pytest.raises(RestoreError, match="step 9"):
        tierfall.load(run.yaml, step=9)


def test_a_folder_of_two_runs_asks_for_one_and_an_empty_run_says_so(place: Place) -> None:
    place.config()
    for run in ("a", "b"):
        with place.open(run=run) as ckpt:
            ckpt.save(1, state_of(1), block=True)
    with pytest.raises(ConfigError, match="a, b"):
        tierfall.load(place.root / "disk")
    assert step_in(tierfall.load(place.root / "disk/b")) == 1
    place.open().close()
    with pytest.raises(RestoreError, match="no checkpoint"):
        tierfall.load(place.yaml)


# Checkpointer.load -----------------------------------------------------------------------------------


def inside(ckpt: tierfall.Checkpointer, *args: Any, **how: Any) -> tuple[Any, dict[str, Any]]:
    found = ckpt.load(*args, **how)
    assert found is not None
    return found


def test_the_run_goes_on_from_what_was_loaded_as_after_a_restore(own: Place) -> None:
    with own.open() as ckpt:
        report, read = inside(ckpt, 2)
        assert (report.step, report.attempt, step_in(read)) == (2, 1, 2)
        assert report.sources[0].tier == "disk"
        with pytest.raises(StepError, match="2"):
            ckpt.save(2, state_of(2))
        ckpt.save(3, state_of(33), block=True)
        ckpt.drain()
        known = {f"{c.step}@{c.attempt}": c.abandoned for c in ckpt.checkpoints()}
    assert known.get("3@1") is not False, "abandoned, or deleted for that"
    assert not known["3@2"]
    assert step_in(tierfall.load(own.yaml)) == 33


def test_a_part_and_a_look_change_no_lineage(own: Place) -> None:
    with own.open() as ckpt:
        assert list(inside(ckpt, 1, only=["w"])[1]) == ["w"]
        assert step_in(inside(ckpt, 1, resume=False)[1]) == 1
        with pytest.raises(StepError, match="restore"):
            ckpt.save(4, state_of(4))
        inside(ckpt)
        inside(ckpt, 1, resume=False)
        ckpt.save(4, state_of(4), block=True)
        assert not any(info.abandoned for info in ckpt.checkpoints())


def test_a_load_reads_memory_and_sets_no_random_state(place: Place) -> None:
    place.config(disk={"flush": {"every": 2}})
    with place.open() as ckpt:
        ckpt.save(1, state_of(1)).captured()
        expected = torch.rand(3)
        before = torch.get_rng_state()
        report, read = inside(ckpt)
        assert [source.tier for source in report.sources] == ["host"]
        assert torch.equal(torch.get_rng_state(), before)
        ckpt.restore({}, step=report.step, only=["rng"])
        assert torch.equal(torch.rand(3), expected)
        ckpt.save(2, state_of(2), block=True)
        assert step_in(read) == 1, "its memory is its own"


# Pointers --------------------------------------------------------------------------------------------


def test_a_pointer_leads_to_its_checkpoint_and_a_run_continues_from_it(own: Place) -> None:
    folder = own.root / "out" / "checkpoint-1"
    with own.open() as ckpt:
        inside(ckpt)
        ckpt.write_pointer(folder, 3)
        ckpt.write_pointer(str(folder), 1)
        ckpt.save(4, state_of(4))
        ckpt.write_pointer(own.root / "soon", 4)
    assert [path.name for path in folder.iterdir()] == ["tierfall.json"]
    pointer = tierfall.read_pointer(folder)
    assert (pointer.run, pointer.step, pointer.attempt) == ("run", 1, 1)
    assert [(tier["name"], tier["kind"]) for tier in pointer.tiers] == [
        *(("host", "host"), ("disk", "file"), ("far", "file"))
    ]
    for way in (folder, str(folder), folder / "tierfall.json"):
        assert step_in(tierfall.load(way)) == 1
    assert step_in(tierfall.load(folder, step=1, attempt=1)) == 1
    assert step_in(tierfall.load(own.root / "soon")) == 4, "it was on its way"
    with pytest.raises(ConfigError, match="step=2"):
        tierfall.load(folder, step=2)
    with own.open() as ckpt:
        assert step_in(inside(ckpt, pointer.step, attempt=pointer.attempt)[1]) == 1


def test_a_pointer_to_what_is_gone_or_damaged_or_not_there_is_an_error_that_names_it(
    own: Place,
) -> None:
    folder = own.root / "out"
    with own.open() as ckpt:
        inside(ckpt)
        ckpt.write_pointer(folder, 1)
        with pytest.raises(StepError, match="step 7"):
            ckpt.write_pointer(own.root / "none", 7)
        ckpt.delete(1)
    assert not (own.root / "none").exists()
    with pytest.raises(RestoreError, match="1@1") as raised:
        tierfall.load(folder)
    assert "3@1" in str(raised.value), "what there is"
    file = folder / "tierfall.json"
    file.write_bytes(file.read_bytes().replace(b'"step":1', b'"step":2'))
    for read in (tierfall.read_pointer, tierfall.load):
        with pytest.raises(IntegrityError):
            read(folder)
    with pytest.raises(ConfigError, match="pointer"):
        tierfall.read_pointer(own.root / "disk")


def test_a_pointer_has_no_options_of_a_store(place: Place, store: Faulty, log: Log) -> None:
    secret = store.tier(options={"secret": "VERY-SECRET"})
    place.config(disk={}, store=secret)
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.write_pointer(place.root / "p", 1)
    assert "VERY-SECRET" not in (place.root / "p" / "tierfall.json").read_text()
    assert not log.lines("VERY-SECRET", level=0)
    assert step_in(tierfall.load(place.root / "p")) == 1
