"""``pin``, ``unpin``, ``rm``, ``prune``, ``forget`` and ``copy`` without a trainer, and two commands at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.contract.kit import (
    IMAGE,
    Place,
    Program,
    blank,
    files_below,
    flip,
    folder_of,
    restored,
    state_of,
    tierfall_command,
    wait_until,
)
from tests.contract.trainer import save

ALL = ("rm", "--run", "run", "--all")


def pinned(place: Place) -> list[int]:
    return [c["step"] for c in place.json("ls")["checkpoints"] if c["pinned"]]


# pin, unpin --------------------------------------------------------------------------------------------


def test_prune_never_deletes_the_newest_from_each_of_two_tiers(place: Place) -> None:
    """No rule keeps it, and each tier has it as safely as the other."""
    place.config(disk={}, far={})
    place.save(1000, 1500)
    rule = {"retain": {"every": 1000}}
    place.config(disk=rule, far=rule)
    place.cli("prune", "--dry-run")
    place.cli("prune")
    assert 1500 in (*place.steps("disk"), *place.steps("far"))
    assert 1000 in place.steps("disk")
    assert place.cli("latest").out == "1500@1\n"


def test_a_step_without_a_good_copy_is_pinned_and_that_is_a_failure(place: Place) -> None:
    place.config()
    save(place, 1, 2)
    (folder_of(place, 2) / IMAGE).unlink()
    assert "damaged" in place.cli("pin", "2", code=1).err
    assert pinned_of_damaged(place) == [2]


def pinned_of_damaged(place: Place) -> list[int]:
    found = place.json("ls", code=1)["checkpoints"]
    return [c["step"] for c in found if c["pinned"]]


def test_on_a_tier_that_is_only_read_nothing_is_pinned_and_the_file_that_writes_there_is_asked_for(
    place: Place,
) -> None:
    place.config(disk={}, far={})
    save(place, 1)
    place.config(disk={}, far={"read_only": True})
    answer = place.cli("pin", "1", code=1)
    assert "pinned 1@1 on disk" in answer.out
    assert "tier far: it is read-only; name a file whose run writes there" in answer.err
    place.config(far={"read_only": True})
    for words in (["pin", "1"], ["tag", "best", "1"], ["rm", "1", "--yes", "--even-the-last"]):
        err = place.cli(*words, code=2).err
        assert err.startswith(f"tierfall: {words[0]}: ")
        assert "name the file of the run that writes there" in err


def test_unpin_says_that_what_was_deleted_beside_its_pin_goes_now(place: Place) -> None:
    place.config()
    save(place, 1, 2)
    decided = place.root / "disk" / "run" / "decided"
    place.cli("pin", "1")
    (pin,) = decided.iterdir()
    shutil.copy(pin, decided / pin.name.replace("-pin-", "-deleted-"))
    assert pinned(place) == [1], "two persons at once: the pin counts"
    answer = place.cli("unpin", "1")
    assert "1@1: a person had deleted it, and only the pin kept it" in answer.err
    for verb in ("pin", "unpin"):
        assert "1@1 was deleted by a person" in place.cli(verb, "1", code=1).err
    with place.open() as ckpt:
        ckpt.restore(blank())
    assert place.steps() == [2]


# rm ----------------------------------------------------------------------------------------------------


def test_rm_deletes_a_step_everywhere_and_leaves_files_of_others(place: Place) -> None:
    place.config(disk={}, far={}, host={"on_close": "keep"})
    save(place, 1, 2, 3)
    with place.open() as ckpt:
        restored(ckpt)
        ckpt.delete(3)
        assert [c.step for c in ckpt.checkpoints()] == [1, 2]
    (folder_of(place, 1) / "notes.txt").write_text("mine")
    assert place.json("rm", "1")["done"] == ["host", "disk", "far"]
    assert place.ls() == {"2@1": {"host": "sealed", "disk": "committed", "far": "committed"}}
    assert list(place.root.glob("*/run/step-00000001-*/*")) == [folder_of(place, 1) / "notes.txt"]
    assert place.json("verify")["ok"]


def test_rm_refuses_a_pinned_step_asks_for_the_newest_and_again_for_the_last(place: Place) -> None:
    place.config()
    save(place, 1, 2)
    place.cli("pin", "1")
    before = files_below(place.root)
    command = f"tierfall unpin --config {place.yaml} 1@1"
    assert command in place.cli("rm", "1", "--yes", code=1).err
    answer = place.cli("rm", "2", code=1)
    assert "the next is 1@1" in answer.err
    assert "--yes" in answer.err
    assert files_below(place.root) == before
    assert place.cli("rm", "2", "--yes").out == "deleted 2@1 on disk\n"
    assert (place.root / "disk" / "run" / "latest").read_text() == "step-00000001-a0001\n"
    place.cli("unpin", "1")
    for words in (["rm", "1"], ["rm", "1", "--yes"]):
        assert "--even-the-last" in place.cli(*words, code=1).err
    place.cli("rm", "1", "--yes", "--even-the-last")
    assert place.ls() == {}


def test_what_counts_as_the_last_is_what_can_be_restored(place: Place) -> None:
    place.config()
    save(place, 1, 2)
    (folder_of(place, 2) / IMAGE).unlink()
    assert "no step is left that can be restored" in place.cli("rm", "1", code=1).err
    assert place.cli("rm", "2").out == "deleted 2@1 on disk\n"
    assert place.ls() == {"1@1": {"disk": "committed"}}


# rm --all ------------------------------------------------------------------------------------------------


@pytest.fixture
def beside(place: Place) -> Place:
    """The run on two tiers and in memory, pinned, beside another run, with files of a person in its folders."""
    place.config(disk={}, far={"shared": True}, host={"on_close": "keep"})
    save(place, 1, 2)
    with place.open(run="other") as ckpt:
        ckpt.save(7, state_of(7), block=True)
    place.cli("pin", "1")
    (place.root / "disk" / "run" / "notes.txt").write_text("mine")
    (folder_of(place, 1) / "my notes.txt").write_text("mine")
    return place


def test_a_whole_run_is_deleted_once_its_name_was_typed(beside: Place) -> None:
    assert "nothing is to be brought" in beside.cli("prefetch").out
    other = {n: d for n, d in files_below(beside.root).items() if "/other/" in n}
    document = json.loads(beside.cli(*ALL, "--json", input="run\n").out)
    assert document["deleted"] == ["host", "disk", "far"]
    assert document["kept"] == {"disk": ["notes.txt", "step-00000001-a0001/my notes.txt"]}
    assert files_below(beside.memory / "run") == {}
    left = {n: d for n, d in files_below(beside.root).items() if "/run/" in n}
    assert left.keys() == {"disk/run/notes.txt", "disk/run/step-00000001-a0001/my notes.txt"}
    assert {n: d for n, d in files_below(beside.root).items() if "/other/" in n} == other
    with beside.open() as ckpt:
        assert ckpt.restore(blank()) is None, "it is a new run"
        ckpt.save(1, state_of(1), block=True)
    assert beside.steps() == [1]


def test_any_other_line_deletes_nothing(beside: Place) -> None:
    before = files_below(beside.root)
    for typed in ("", "yes\n", "Run\n", " run\n"):
        answer = beside.cli(*ALL, "--yes", input=typed, code=1)
        assert "nothing was deleted" in answer.err
        assert "2 checkpoints" in answer.out
    for words in (["rm", "--all"], ["rm", "--all", "--run", "run", "1"], ["rm"]):
        beside.cli(*words, input="run\n", code=2)
    assert files_below(beside.root) == before


def test_a_run_is_not_deleted_while_a_tier_is_away_or_if_it_was_saved_after_it_was_shown(
    beside: Place,
) -> None:
    shutil.move(beside.root / "far", beside.root / "unmounted")
    before = files_below(beside.root)
    refused = beside.cli(*ALL, input="run\n", code=1)
    assert "tier far" in refused.err
    assert files_below(beside.root) == before
    shutil.move(beside.root / "unmounted", beside.root / "far")
    deleting = beside.begin(*ALL)
    while "type the name" not in deleting.line():
        pass
    save(beside, 3)
    answer = deleting.end(input="run\n")
    assert answer.code == 1
    assert "3@2" in answer.err
    assert beside.steps() == [1, 2, 3]


def test_a_run_that_two_machines_trained_is_deleted_on_each(place: Place) -> None:
    """The second one takes the shared tier, from which the run is gone by then, for unmounted."""
    config = place.config(host={"on_close": "keep"}, far={"shared": True})
    save(place, 1)
    host, far = config["tiers"]
    there = {**config, "tiers": [{**host, "folder": str(place.root / "memory there")}, far]}
    place.write(there)
    save(place, 2)
    place.write(config)
    place.cli(*ALL, input="run\n")
    place.write(there)
    assert "tierfall forget" in place.cli(*ALL, input="run\n", code=1).err
    place.cli("forget", "far")
    place.cli(*ALL, input="run\n")
    with place.open() as ckpt:
        assert ckpt.restore(blank()) is None


def test_a_tier_that_is_only_read_keeps_its_files_and_is_named(place: Place) -> None:
    place.config(disk={}, far={})
    save(place, 1, 2)
    place.config(disk={}, far={"read_only": True})
    before = files_below(place.root / "far")
    assert "far" in place.cli(*ALL, input="run\n", code=1).err
    assert files_below(place.root / "far") == before
    assert place.folders("disk") == []


# prune ---------------------------------------------------------------------------------------------------


def drops(document: dict[str, Any]) -> list[tuple[str, int]]:
    return [(d["tier"], d["step"]) for d in document["decisions"] if d["verdict"] == "drop"]


def test_prune_does_what_the_dry_run_said_with_its_reasons(place: Place) -> None:
    place.config(disk={}, far={"flush": {"every": 2}})
    save(place, *range(1, 7))
    place.cli("pin", "2")
    far = {"flush": {"every": 2}, "retain": {"last": 1}}
    place.config(disk={"retain": {"last": 2}}, far=far)
    before = files_below(place.root)
    planned = place.json("prune", "--dry-run")
    assert planned["dry_run"]
    assert drops(planned) == [("disk", 1), ("disk", 3), ("disk", 4), ("far", 4)]
    assert not any(d["dropped"] for d in planned["decisions"])
    assert all(d["reason"] and d["bytes"] > 80_000 for d in planned["decisions"])
    reasons = {(d["tier"], d["step"]): d["reason"] for d in planned["decisions"]}
    assert "pinned" in reasons["disk", 2]
    assert "last: 2" in reasons["disk", 1]
    assert files_below(place.root) == before
    done = place.json("prune")
    assert drops(done) == drops(planned)
    assert (place.steps("disk"), place.steps("far")) == ([2, 5, 6], [2, 6])
    attempts = place.root / "disk" / "run" / "attempts"
    assert [path.name for path in attempts.iterdir()] == ["a0001.json"], "it takes no attempt"


def test_prune_keeps_what_another_tier_is_still_owed(place: Place) -> None:
    place.config(disk={})
    save(place, 1, 2, 3)
    place.config(disk={"retain": {"last": 1}}, far={"flush": {"every": 2}})
    (place.root / "far").mkdir()
    reasons = {d["step"]: d["reason"] for d in place.json("prune", "--dry-run")["decisions"]}
    assert "far" in reasons[2]
    place.cli("prune")
    assert place.steps("disk") == [2, 3]


def test_prune_keeps_an_older_good_copy_rather_than_a_damaged_newer_one(place: Place) -> None:
    place.config()
    save(place, 1, 2, 3)
    flip(folder_of(place, 3) / IMAGE, -1)
    place.cli("verify", code=1)
    place.config(disk={"retain": {"last": 1}})
    place.cli("prune", code=-1)
    assert place.ls()["2@1"] == {"disk": "committed"}
    assert place.restored().step == 2


def test_prune_deletes_a_damaged_copy_where_it_would_delete_a_whole_one(place: Place) -> None:
    place.config()
    save(place, 1, 2, 3, 4)
    for step in (1, 3):
        flip(folder_of(place, step) / IMAGE, -1)
    place.cli("verify", code=1)
    place.config(disk={"retain": {"last": 2}})
    planned = place.json("prune", "--dry-run")["decisions"]
    assert {d["step"]: d["verdict"] for d in planned} == {
        1: "drop",
        2: "keep",
        3: "keep",
        4: "keep",
    }
    assert "damaged" in next(d["reason"] for d in planned if d["step"] == 1)
    place.cli("prune")
    assert [*place.ls()] == ["2@1", "3@1", "4@1"]


# forget ----------------------------------------------------------------------------------------------------


def test_a_tier_that_was_emptied_counts_as_unmounted_until_it_is_forgotten(place: Place) -> None:
    place.config(disk={}, far={"shared": True})
    save(place, 1)
    shutil.rmtree(place.root / "far")
    (place.root / "far").mkdir()
    assert "tierfall forget" in place.cli("ls", code=1).err
    assert "disk" in place.cli("forget", "far").out
    assert place.ls() == {"1@1": {"disk": "committed"}}
    save(place, 2)
    assert place.steps("far")[-1] == 2
    assert place.json("ls")["ok"]
    shutil.move(place.root / "far", place.root / "unmounted")
    assert "disk" in place.cli("forget", "far").out
    assert not (place.root / "far").exists(), "it creates no folder of a tier"
    assert "there are disk, far" in place.cli("forget", "fra", code=2).err


# copy ------------------------------------------------------------------------------------------------------


def test_copy_brings_a_step_to_a_tier_whatever_its_rule_is(place: Place) -> None:
    place.config(disk={}, far={"flush": {"every": 9}, "compress": {"codec": "zstd"}})
    save(place, 1, 2)
    place.cli("pin", "1")
    copied = place.json("copy", "1", "--to", "far")
    assert (copied["step"], copied["already"]) == (1, False)
    assert place.ls()["1@1"] == {"disk": "committed", "far": "committed"}
    assert [path.name for path in folder_of(place, 1, "far").glob("*.zst")] == [f"{IMAGE}.zst"]
    assert place.steps("far") == [1]
    place.config(far={})
    assert pinned(place) == [1], "the pin went with the copy"
    far = {"flush": {"every": 9}, "compress": {"codec": "zstd"}}
    place.config(disk={}, far=far)
    assert place.json("copy", "1", "--to", "far")["already"]
    place.config(disk={}, far={"retain": {"last": 1}})
    save(place, 3)
    assert place.steps("far") == [1, 3]


def test_copy_takes_good_chunks_wherever_they_are(place: Place) -> None:
    place.config(disk={}, far={}, third={"flush": {"every": 9}})
    save(place, 1)
    flip(folder_of(place, 1, "disk") / IMAGE, 70_000)
    flip(folder_of(place, 1, "far") / IMAGE, -1)
    place.cli("copy", "1", "--to", "third", code=-1)
    assert place.steps("third") == [1]


def test_a_copy_that_fails_leaves_nothing_and_does_not_stop_the_others(place: Place) -> None:
    place.config(disk={}, far={"flush": {"every": 9}})
    save(place, 1, 2)
    image = folder_of(place, 1) / IMAGE
    image.write_bytes(bytes(image.stat().st_size))
    answer = place.cli("copy", "1", "2", "--to", "far", code=1)
    assert "copied 2@1 from disk to far" in answer.out
    assert "1@1" in answer.err
    assert place.steps("far") == [2]
    assert not folder_of(place, 1, "far").exists()


def test_copy_respects_a_capacity_reports_what_rules_will_do_and_refuses_other_targets(
    place: Place,
) -> None:
    place.config(disk={}, far={"flush": {"every": 9}, "capacity": "200KiB"})
    save(place, 1, 2, 3)
    place.cli("copy", "1", "--to", "far")
    assert "far" in place.cli("copy", "2", "--to", "far", code=1).err
    assert place.steps("far") == [1]
    for target in ("host", "nowhere"):
        assert target in place.cli("copy", "1", "--to", target, code=2).err
    far = {"flush": {"every": 9}, "retain": {"last": 1}}
    place.config(disk={}, far=far)
    answer = place.cli("copy", "3", "--to", "far")
    assert "pin" in answer.out + answer.err, "what will be deleted is reported, with what keeps it"


# Two commands at once ----------------------------------------------------------------------------------------


@pytest.fixture
def copying(place: Place) -> Iterator[Callable[..., Program]]:
    """``copying(max_wait, bandwidth)``: ``tierfall copy`` of 1 MB at work."""
    started: list[Program] = []

    def start(max_wait: str, bandwidth: str = "50kB/s") -> Program:
        place.config(host={"capacity": "16MiB"})
        save(place, 1, 2, elements=250_000)
        (place.root / "slow").mkdir()
        place.config(
            disk={}, slow={"flush": {"every": 9}, "bandwidth": bandwidth}, max_wait=max_wait
        )
        started.append(place.begin("copy", "1", "--to", "slow"))
        wait_until(lambda: any((place.root / "slow").rglob("step-*")), "the copy has begun")
        return started[-1]

    yield start
    for program in started:
        program.kill()


def test_a_second_command_waits_for_the_first(
    place: Place, copying: Callable[..., Program]
) -> None:
    first = copying("60s", "600kB/s")
    assert place.json("ls")["owner"] is None, "a command is no trainer"
    assert place.cli("pin", "2").out == "pinned 2@1 on disk\n"
    assert first.end().code == 0
    assert place.ls()["1@1"] == {"disk": "committed", "slow": "committed"}
    assert pinned(place) == [2]


def test_it_waits_no_longer_than_max_wait_and_names_the_command(
    place: Place, copying: Callable[..., Program]
) -> None:
    copying("300ms")
    refused = place.cli("pin", "2", code=1)
    assert "tierfall copy" in refused.err
    assert "trainer" not in refused.err
    assert pinned(place) == []


def test_a_killed_copy_leaves_nothing_that_counts_and_can_be_repeated(
    place: Place, copying: Callable[..., Program]
) -> None:
    copying("60s").kill()
    assert place.folders("slow") == []
    place.config(disk={}, slow={"flush": {"every": 9}})
    place.cli("copy", "1", "--to", "slow")
    assert place.ls()["1@1"] == {"disk": "committed", "slow": "committed"}
    assert place.json("verify")["notes"] == []
    assert "1@1" in tierfall_command("latest", "--config", str(place.root / "slow")).out


def test_of_two_imports_of_one_step_the_second_says_that_the_step_is_there(place: Place) -> None:
    place.config(disk={"bandwidth": "400kB/s"}, max_wait="60s")
    torch.save({"w": torch.ones(150_000)}, place.root / "x.pt")
    words = ("import", "x.pt", "--as-step", "5")
    first = place.begin(*words)
    wait_until(lambda: any((place.root / "disk").rglob("step-*")), "the import has begun")
    assert "5" in place.cli(*words, code=1).err
    assert first.end().code == 0
    assert place.ls() == {"5@1": {"disk": "committed"}}
