"""Several ranks: one checkpoint or none, commands of all, layouts and their number, and ranks that fail.

All are on one node; where a test has them ``apart``, ranks 2 and 3 are on another. Each node has memory and a disk
``nvme`` of its own, and both see ``pfs``. All tests but those that kill share the four processes.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import tierfall
from tests.contract import of_ranks
from tests.contract.kit import Crew, Raised, crew, equal, flip, tierfall_command, wait_until
from tests.contract.of_ranks import WHOLE
from tierfall.errors import LockError

SELDOM = {"flush": {"every": 100}}


@pytest.fixture
def apart(four: Crew) -> Iterator[Crew]:
    """The same, on two nodes."""
    four.nodes = [0, 0, 1, 1]
    yield four
    four.nodes = [0, 0, 0, 0]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def step_folder(root: Path, tier: str, step: int, attempt: int = 1) -> Path:
    return root / tier / "run" / f"step-{step:08d}-a{attempt:04d}"


def image(rank: int) -> str:
    return f"rank-{rank:05d}-of-00004.safetensors"


def committed(root: Path, tier: str) -> list[str]:
    return sorted(path.parent.name for path in (root / tier / "run").glob("step-*/commit.json"))


def command(
    folder: str, *words: str, node: str = "0", input: str | None = None, **changes: Any
) -> Any:
    """Run a command with the configuration of a node."""
    file = Path(folder) / f"tiers-{node}.yaml"
    file.write_text(json.dumps(of_ranks.config(folder, node, **changes)))
    word, *rest = words
    return tierfall_command(word, "--config", str(file), *rest, input=input)


# One checkpoint, or none -------------------------------------------------------------------------------


def test_a_node_with_a_new_disk_gets_its_part_before_the_ranks_start(
    apart: Crew, folder: str, tmp_path: Path
) -> None:
    apart.run(of_ranks.go_on, folder=folder, steps=[1], wait=["nvme", "pfs"])
    for node in "01":
        shutil.rmtree(tmp_path / f"memory-{node}")
    shutil.rmtree(tmp_path / "nvme-1")
    held = json.loads(command(folder, "prefetch", "--json").out)
    assert (held["tier"], held["already"], held["ranks"]) == (None, True, [0, 1])
    done = json.loads(command(folder, "prefetch", "--node", "1/2", "--json", node="1").out)
    assert (done["tier"], done["ranks"], done["problems"]) == ("nvme", [2, 3], [])
    images = {path.name for path in step_folder(tmp_path, "nvme-1", 1).glob("*.safetensors")}
    assert images == {image(2), image(3)}
    found = apart.run(of_ranks.go_on, folder=folder, steps=[2], wait=["nvme", "pfs"])
    assert [(one["step"], one["good"], one["tiers"]) for one in found] == [(1, True, ["nvme"])] * 4
    rest = json.loads(command(folder, "prefetch", "1", "--node", "0/2", "--json", node="1").out)
    assert rest["ranks"] == [0, 1, 2, 3], "what it has of it stays"
    assert command(folder, "verify", node="1").code == 0


def test_a_run_that_another_node_deletes_meanwhile_is_not_brought_back_by_images_in_memory(
    apart: Crew, folder: str, tmp_path: Path
) -> None:
    kept = {"host": {"on_close": "keep"}}
    apart.run(of_ranks.go_on, folder=folder, steps=[1], wait=["nvme", "pfs"], **kept)
    there = step_folder(tmp_path, "nvme-1", 1)
    shutil.rmtree(there)
    (there.parent / "latest").unlink()
    slow = {"nvme": {"bandwidth": "40kB/s"}, **kept}
    with ThreadPoolExecutor() as beside:
        words = ("prefetch", "--node", "0/1")
        prefetch = beside.submit(lambda: command(folder, *words, node="1", **slow))
        wait_until((there / image(1)).exists, "what memory lacks has arrived")
        answer = command(folder, "rm", "--run", "run", "--all", input="run\n")
        assert answer.code == 0, answer.err
        assert prefetch.result().code == 1, prefetch.result().out
    assert committed(tmp_path, "nvme-1") == []


def test_what_a_close_left_that_was_killed_on_some_ranks_goes_with_a_later_start(
    four: Crew, folder: str, tmp_path: Path
) -> None:
    """Rank 3 had freed step 3, which no tier has, the others had not; step 4 is newer, and on the tiers."""
    seldom = {"nvme": {"flush": {"every": 2}}, "pfs": {"flush": {"every": 2}}}
    host = {"capacity": "4MiB"}
    saved = {"steps": [1, 2, 3, 4], "wait": ["host"], **seldom}
    four.run(of_ranks.go_on, folder=folder, **saved, host={**host, "on_close": "keep"})
    found = sorted((tmp_path / "memory-0").rglob("*.image"))
    for path in found:
        step, slot = newest_step_in(path), int(path.name[5])
        if step == 4 or (step == 3 and slot == 3):
            path.unlink()
    assert len([*(tmp_path / "memory-0").rglob("*.image")]) == 11
    found = four.run(of_ranks.go_on, folder=folder, **seldom, host=host)
    assert [(one["step"], one["good"]) for one in found] == [(4, True)] * 4
    assert [*(tmp_path / "memory-0").rglob("*.image")] == []


@pytest.mark.parametrize("by", ["drain", "a close"])
def test_what_a_killed_close_left_stays_on_all_nodes_if_one_has_lost_its_part_of_the_newest(
    apart: Crew, folder: str, tmp_path: Path, by: str
) -> None:
    """Each node sees its own part of step 4 alone; step 3, in memory alone, is the newest that all have."""
    seldom = {"nvme": {"flush": {"every": 2}}, "pfs": SELDOM, "host": {"capacity": "4MiB"}}
    saved = {**seldom, "host": {"capacity": "4MiB", "on_close": "keep"}}
    apart.run(of_ranks.go_on, folder=folder, steps=[1, 2, 3, 4], wait=["host"], **saved)
    for path in tmp_path.glob("memory-*/**/*.image"):
        if re.search(rb'"step":4,"attempt":1', path.read_bytes()):
            path.unlink()
    if by == "drain":
        (step_folder(tmp_path, "nvme-1", 4) / image(2)).unlink()
        for node in "01":
            assert "host memory is kept" in command(folder, "drain", node=node, **seldom).out
    else:
        lost = tmp_path / "nvme-1"
        apart.run(of_ranks.lose_disk, folder=folder, loser=2, lost=str(lost), **seldom)
        lost.unlink()
    found = apart.run(of_ranks.go_on, folder=folder, **seldom)
    assert [(one["step"], one["good"]) for one in found] == [(3, True)] * 4


def newest_step_in(path: Path) -> int:
    """The step of an image in memory, by its commit record."""
    found = re.findall(rb'"step":(\d+),"attempt":1', path.read_bytes())
    return max(map(int, found))


def test_what_all_ranks_save_all_ranks_restore_bit_for_bit(
    apart: Crew, folder: str, tmp_path: Path
) -> None:
    """No file says what the nodes share of ``nvme``: they find it out."""
    found_out = {"nvme": {"shared": None}}
    first = apart.run(
        of_ranks.go_on, folder=folder, steps=[1, 2], wait=["nvme", "pfs"], **found_out
    )
    assert [one["step"] for one in first] == [None] * 4, "a first start restores nothing"
    assert {str(one["known"]) for one in first} == {str(first[0]["known"])}
    again = apart.run(of_ranks.go_on, folder=folder)
    assert [(one["step"], one["good"]) for one in again] == [(2, True)] * 4
    assert all("nvme" in one["tiers"] for one in again), "each reads the disk of its node"
    for tier, ranks in (("nvme-0", [0, 1]), ("nvme-1", [2, 3]), ("pfs", [0, 1, 2, 3])):
        there = step_folder(tmp_path, tier, 2)
        assert (there / "commit.json").exists()
        assert sorted(p.name for p in there.glob("*.safetensors")) == [image(r) for r in ranks]
    assert command(folder, "latest").out == "2@1\n"
    assert command(folder, "verify").code == 0


def test_a_shard_that_is_damaged_everywhere_takes_all_ranks_to_the_older_step(
    four: Crew, folder: str, tmp_path: Path
) -> None:
    four.run(of_ranks.go_on, folder=folder, steps=[1, 2], wait=["nvme", "pfs"])
    for tier in ("nvme-0", "pfs"):
        flip(step_folder(tmp_path, tier, 2) / image(3), -1)
    found = four.run(of_ranks.go_on, folder=folder)
    assert [(one["step"], one["good"]) for one in found] == [(1, True)] * 4
    assert all(any("2@1" in text for text in one["fallbacks"]) for one in found)


def test_a_shard_that_no_rank_can_reach_is_named_and_nothing_begins_anew(
    apart: Crew, folder: str, tmp_path: Path
) -> None:
    apart.run(of_ranks.go_on, folder=folder, steps=[1], wait=["nvme"], pfs=SELDOM)
    shutil.rmtree(tmp_path / "nvme-1")
    shutil.rmtree(tmp_path / "memory-1", ignore_errors=True)
    found = apart.outcomes(of_ranks.go_on, folder=folder, pfs=SELDOM)
    assert all(isinstance(one, Raised) and one.kind == "RestoreError" for one in found), found
    assert all("2" in one.text and "3" in one.text for one in found), "the ranks are named"


def test_a_node_without_its_disk_reads_the_shared_tier_and_the_other_its_own(
    apart: Crew, folder: str, tmp_path: Path
) -> None:
    apart.run(of_ranks.go_on, folder=folder, steps=[1], wait=["nvme", "pfs"])
    shutil.rmtree(tmp_path / "nvme-1")
    found = apart.run(of_ranks.go_on, folder=folder)
    assert [(one["step"], one["good"]) for one in found] == [(1, True)] * 4
    assert [one["tiers"] for one in found] == [["nvme"], ["nvme"], ["pfs"], ["pfs"]]


def test_what_a_disk_kept_of_another_life_of_the_run_is_not_read(
    apart: Crew, folder: str, tmp_path: Path
) -> None:
    """A step of the same name that a node saved before the run was begun anew."""
    of_step = "nvme-1/run/step-00000001-a0001"
    apart.run(of_ranks.go_on, folder=folder, steps=[1], wait=["nvme", "pfs"])
    shutil.move(tmp_path / of_step, tmp_path / "before")
    for name in ("nvme-0", "nvme-1", "pfs", "memory-0", "memory-1"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    apart.run(of_ranks.go_on, folder=folder, steps=[1], wait=["nvme", "pfs"])
    shutil.rmtree(tmp_path / of_step)
    shutil.move(tmp_path / "before", tmp_path / of_step)
    found = apart.run(of_ranks.go_on, folder=folder)
    assert [(one["step"], one["good"]) for one in found] == [(1, True)] * 4
    assert [one["tiers"] for one in found] == [["nvme"], ["nvme"], ["pfs"], ["pfs"]]


def test_what_only_the_disk_of_another_node_has_is_read_there_and_sent(
    apart: Crew, folder: str, tmp_path: Path
) -> None:
    """The ranks changed places; no other tier has the step."""
    apart.run(of_ranks.go_on, folder=folder, steps=[1], wait=["nvme"], pfs=SELDOM)
    shutil.rmtree(tmp_path / "memory-0", ignore_errors=True)
    shutil.rmtree(tmp_path / "memory-1", ignore_errors=True)
    (tmp_path / "nvme-0").rename(tmp_path / "aside")
    (tmp_path / "nvme-1").rename(tmp_path / "nvme-0")
    (tmp_path / "aside").rename(tmp_path / "nvme-1")
    found = apart.run(of_ranks.go_on, folder=folder, pfs=SELDOM)
    assert [(one["step"], one["good"]) for one in found] == [(1, True)] * 4


def test_memory_outlives_the_ranks_and_is_restored_from(
    four: Crew, folder: str, tmp_path: Path
) -> None:
    seldom = {"nvme": SELDOM, "pfs": SELDOM}
    four.run(of_ranks.go_on, folder=folder, steps=[1, 2], wait=["host"], **seldom)
    assert committed(tmp_path, "pfs") == committed(tmp_path, "nvme-0") == []
    found = four.run(of_ranks.go_on, folder=folder, nvme=SELDOM)
    assert [(one["step"], one["good"], one["tiers"]) for one in found] == [(2, True, ["host"])] * 4
    assert "step-00000002-a0001" in committed(tmp_path, "pfs"), "the next start owed it"


def test_a_save_that_one_rank_makes_alone_is_given_up_and_later_ones_are_saved(
    four: Crew, folder: str, tmp_path: Path
) -> None:
    found = four.run(of_ranks.alone, folder=folder, only=1)
    what, why = found[1][0]
    assert what == "failed"
    assert "rank" in why
    assert all(later[-1] == "saved" for _, later in found)
    assert "step-00000001-a0001" not in committed(tmp_path, "pfs")
    assert "step-00000004-a0001" in committed(tmp_path, "pfs")


def test_a_state_that_one_rank_cannot_save_gives_the_step_up_for_all(
    four: Crew, folder: str, tmp_path: Path
) -> None:
    found = four.run(of_ranks.unsavable, folder=folder, bad=2)
    assert found[2][0][0] == "raised"
    for first, second in found[:2]:
        assert first[0] == "failed"
        assert "rank 2" in first[1]
        assert "function" in first[1]
        assert second == "saved"
    assert committed(tmp_path, "pfs") == ["step-00000002-a0001"]


def test_a_copy_that_one_rank_cannot_write_is_given_up_by_all_and_retried_by_the_next_start(
    four: Crew, folder: str, tmp_path: Path
) -> None:
    four.run(of_ranks.go_on, folder=folder, steps=[1], wait=["nvme", "pfs"])
    in_the_way = step_folder(tmp_path, "nvme-0", 2, attempt=2) / image(3)
    found = four.run(of_ranks.copies, folder=folder, step=2, in_the_way=str(in_the_way))
    assert [pfs[0] for _, pfs in found] == ["saved"] * 4
    assert [nvme[0] for nvme, _ in found] == ["failed"] * 4
    assert all("rank 3" in nvme[1] for nvme, _ in found[:3])
    assert committed(tmp_path, "nvme-0") == ["step-00000001-a0001"]


def test_what_one_rank_cannot_restore_fails_the_restore_of_all(four: Crew, folder: str) -> None:
    four.run(of_ranks.go_on, folder=folder, steps=[1])
    found = four.outcomes(of_ranks.misfit, folder=folder, bad=3)
    assert all(isinstance(one, Raised) for one in found), found
    assert "step" in found[3].text
    assert all("rank 3" in one.text for one in found[:3])


def test_a_tier_that_nodes_see_otherwise_than_the_file_says_is_refused_on_all_ranks(
    apart: Crew, folder: str
) -> None:
    apart.run(of_ranks.go_on, folder=folder, steps=[1])
    found = apart.outcomes(of_ranks.go_on, folder=folder, pfs={"shared": False})
    assert [one.kind for one in found if isinstance(one, Raised)] == ["ConfigError"] * 4, found
    assert all("pfs" in one.text and "shared" in one.text for one in found)
    assert all(one["good"] for one in apart.run(of_ranks.go_on, folder=folder))


# When ranks save ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "step_s"), [({"every": 4}, 0.0), ({"every": "100ms"}, 0.1)])
def test_all_ranks_save_the_same_steps_and_the_last_one(
    four: Crew, folder: str, tmp_path: Path, interval: dict[str, Any], step_s: float
) -> None:
    """By time, rank 0 announces a step a second ahead."""
    words = {"folder": folder, "interval": interval, "until": 18, "step_s": step_s}
    found = four.run(of_ranks.cadence, **words)
    assert found == [found[0]] * 4
    assert found[0]
    if interval == {"every": 4}:
        assert found[0] == [4, 8, 12, 16]
    assert committed(tmp_path, "pfs")[-1] == "step-00000018-a0001"


@pytest.mark.parametrize("last", [[1, 1, 1, 1], [2, 1, 2, 2]])
def test_ranks_whose_training_fails_end_within_seconds_and_half_a_step_is_none(
    four: Crew, folder: str, last: list[int]
) -> None:
    took = four.run(of_ranks.fails, folder=folder, last=last)
    assert max(took) < 15, took
    found = four.run(of_ranks.go_on, folder=folder)
    assert [(one["step"], one["good"]) for one in found] == [(1, True)] * 4


# Commands ----------------------------------------------------------------------------------------------


def test_commands_of_all_ranks_are_executed_once_and_return_the_same(
    apart: Crew, folder: str, tmp_path: Path
) -> None:
    found = apart.run(of_ranks.commands, folder=folder)
    for returned in ("prune", "drain"):
        assert [one[returned] for one in found] == [found[0][returned]] * 4
    pinned = {step: (is_pinned, tiers) for step, is_pinned, tiers in found[0]["pinned"]}
    assert pinned[1] == (True, ["nvme", "pfs"]), "a pin keeps it on each node's disk"
    assert [1, "nvme", "keep"] in found[0]["prune"]
    assert 2 not in [step for step, _, _ in found[0]["deleted"]]
    assert found[0]["drain"][1] == [], "nothing is left"
    assert committed(tmp_path, "nvme-0") == ["step-00000004-a0001"]
    assert committed(tmp_path, "nvme-1") == ["step-00000004-a0001"]
    expected = [f"step-0000000{step}-a0001" for step in (1, 3, 4)]
    assert committed(tmp_path, "pfs") == expected


def test_ranks_that_ask_for_different_things_are_named_and_the_next_call_of_all_works(
    four: Crew, folder: str
) -> None:
    found = four.run(of_ranks.commands_that_differ, folder=folder)
    for differing, pinned, _, last in found:
        assert differing[0] == "RanksError"
        assert "rank" in differing[1]
        assert pinned == [[]], "nothing was done"
        assert last == [[2]]
    kind, why = found[0][2]
    assert kind == "RanksError", "only rank 0 made that call"
    assert "rank" in why


def test_a_command_beside_the_job_is_executed_on_all_nodes(
    apart: Crew, folder: str, tmp_path: Path
) -> None:
    apart.run(of_ranks.stay, folder=folder, steps=[1, 2], wait="pfs")
    try:
        marked = command(folder, "rm", "1")
        assert marked.code == 0, marked.err
        found = [apart.run(of_ranks.save_timed, step=step)[0] for step in (3, 4)]
        assert found
        wait_until(
            lambda: not list(tmp_path.glob("*/run/step-00000001-*/commit.json")), "step 1 is gone"
        )
    finally:
        apart.run(of_ranks.leave)


# Layouts, and another number of ranks --------------------------------------------------------------------


ALL = [0, 1, 2, 3]
Trained = Callable[[str], tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def half(four: Crew, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By layout: what a training to step 2 returned on rank 0, and its ``folder``, for copies."""
    found = {}
    for layout in ("fsdp", "tp-fsdp"):
        words = {"folder": str(tmp_path_factory.mktemp(layout)), "layout": layout, "members": ALL}
        trained = four.run(of_ranks.train_model, until=2, **words)
        assert all((one["first"], one["lazy"]) == (1, 1) for one in trained), "captured lazily"
        found[layout] = words | trained[0]
    return found


@pytest.fixture
def trained(half: dict[str, dict[str, Any]], tmp_path: Path) -> Trained:
    """``trained(layout)``: the words of a training in a copy of what is trained to step 2; and its digest."""

    def copy(layout: str) -> tuple[dict[str, Any], str]:
        shutil.copytree(half[layout]["folder"], tmp_path, dirs_exist_ok=True)
        words = {"folder": str(tmp_path), "layout": layout, "members": ALL}
        return words, half[layout]["digest"]

    return copy


@pytest.mark.parametrize("layout", ["fsdp", "tp-fsdp"])
def test_a_sharded_training_continues_to_the_same_bits(
    four: Crew, tmp_path: Path, trained: Trained, layout: str
) -> None:
    words, digest = trained(layout)
    resumed = four.run(of_ranks.train_model, until=3, **words)
    assert [(one["first"], one["restored"]) for one in resumed] == [(3, digest)] * 4
    words["folder"] = str(tmp_path / "straight")
    straight = four.run(of_ranks.train_model, until=3, saves=False, **words)
    assert {one["digest"] for one in resumed} == {straight[0]["digest"]}


def test_a_sharded_model_comes_back_on_two_ranks_on_one_and_on_four_again(
    four: Crew, tmp_path: Path, trained: Trained
) -> None:
    """Each start continues from what the one before saved, in its own layout; some save on."""
    words, digest = trained("fsdp")
    assert of_ranks.digest_of(tierfall.load(step_folder(tmp_path, "pfs", 2))) == digest
    newest = 2
    for until, layout, members in (
        (2, "plain", [0]),
        (2, "tp", [0, 1, 2]),
        (3, "fsdp", [0, 1]),
        (4, "hsdp", ALL),
        (4, "fsdp", ALL),
    ):
        words |= {"layout": layout, "members": members}
        found = four.run(of_ranks.train_model, until=until, **words)
        for rank in members:
            assert (found[rank]["first"], found[rank]["restored"]) == (newest + 1, digest), layout
            assert found[rank]["own"] == 100 + rank, "each its own, as far as there was one"
        newest, digest = until, found[0]["digest"]


def test_load_returns_whole_tensors_and_the_values_of_each_rank(
    four: Crew, folder: str, trained: Trained
) -> None:
    _, digest = trained("tp-fsdp")
    found = four.run(of_ranks.load_model, folder=folder)
    assert found == [[2, digest, 100 + rank] for rank in range(4)]


@pytest.mark.parametrize("layout", ["fsdp", "tp-fsdp"])
def test_a_tensor_of_four_ranks_is_one_and_is_cut_across_their_images(
    tmp_path: Path, trained: Trained, layout: str
) -> None:
    trained(layout)
    loaded = tierfall.load(tmp_path / "pfs")
    expected = {f"model.{name}": each for name, each in loaded["model"].items()}
    with tierfall.open_tensors(tmp_path / "pfs") as tensors:
        assert expected.keys() < {*tensors}
        for name, whole in expected.items():
            assert equal(tensors[name], whole), name
            part = tensors.slice(name)
            assert part.shape == whole.shape
            for index in (slice(5, 9), -1, (..., slice(1, None, 3)), slice(0, None, 7)):
                assert torch.equal(part[index], whole[index]), (name, index)
        moments = loaded["optimizer"]["state"]
        assert any(
            equal(tensors["optimizer.state.model.0.weight.exp_avg"], each["exp_avg"])
            for each in moments.values()
        )
        images = [(step_folder(tmp_path, "pfs", 2) / image(rank)).stat().st_size for rank in ALL]
        [tensors[name] for name in tensors]
        assert sum(tensors.sources.values()) == sum(images), "each chunk once, replicas too"
    shard = step_folder(tmp_path, "pfs", 2) / image(1)
    with tierfall.open_tensors(shard) as tensors:
        assert equal(tensors["model.0.weight"], tierfall.load(shard)["model"]["0.weight"])


def test_replicas_are_written_once_and_those_that_differ_fail_that_save_by_name(
    four: Crew, folder: str, tmp_path: Path
) -> None:
    """They come back to all with their ties and own buffers; after they differed, each rank writes its own."""
    found = four.run(of_ranks.replicas, folder=folder, steps=[1, 2, 3], differ_at=2)
    for first, second, third in found:
        assert (first[0], second[0], third[0]) == ("saved", "failed", "saved")
        assert "model.body.weight" in second[1]
        assert "rank 2" in second[1]
    written: Counter[str] = Counter()
    for path in step_folder(tmp_path, "pfs", 1).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            written.update(file.keys())
    assert written["model.embedding.weight"] + written["model.head.weight"] == 1
    assert written["model.body.weight"] == 1
    assert written["model.seen"] == 4
    assert written["stage0.weight"] == written["stage1.weight"] == 1, "two ranks have each"
    loaded = tierfall.load(tmp_path / "pfs", only=["model"], step=1)["model"]
    assert equal(loaded["embedding.weight"], loaded["head.weight"])
    for step in (3, 1):
        found = four.run(of_ranks.replicas_again, folder=folder, step=step, changed=step == 3)
        assert found == [[step, True, True]] * 4


# Blocks that the caller places -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        ("rows", [("rows", ALL), ("columns", ALL), ("grid", [1, 2]), ("plain", [3])]),
        ("layers", [("layers", ALL), ("rows", [0, 1]), ("dtensor", ALL)]),
        ("grid", [("layers", [0, 1, 2]), ("odd", ALL), ("columns", [2])]),
        ("pairs", [("pairs", ALL), ("layers", [0])]),
        ("odd", [("odd", ALL), ("left out", ALL), ("rows", [2, 3])]),
        ("left out", [("left out", ALL), ("rows", ALL), ("rows", [2, 3])]),
        ("dtensor", [("grid", ALL)]),
        ("plain", [("columns", ALL), ("layers", [0])]),
    ],
)
def test_blocks_come_back_in_any_layout(
    four: Crew, folder: str, tmp_path: Path, saved: str, restored: list[Any]
) -> None:
    """With replicas, several blocks of a rank, ranks without any, and blocks of length 0; each byte is stored once."""
    words = {"folder": folder, "layout": saved, "members": ALL}
    assert four.run(of_ranks.blocks, saves=True, **words) == [[["saved", ""]] * 2] * 4
    if saved != "plain":
        folder_of_one = step_folder(tmp_path, "pfs", 1)
        written = [
            (piece["name"].partition("%")[0], *piece["offset"])
            for path in folder_of_one.glob("rank-*.json")
            for piece in json.loads(path.read_text())["pieces"]
            if piece["end"] > piece["start"] and piece["name"].startswith("deep")
        ]
        assert len(written) == len({*written})
    deep = tierfall.load(tmp_path / "pfs")["deep"]
    assert equal(deep, {"seed": 5, "w": WHOLE, "half": (WHOLE / 3).bfloat16()})
    with tierfall.open_tensors(tmp_path / "pfs") as tensors:
        assert torch.equal(tensors.slice("deep.w")[3:7, 1:], WHOLE[3:7, 1:])
    for layout, members in restored:
        found = four.run(of_ranks.blocks, folder=folder, layout=layout, members=members)
        assert [found[rank] for rank in members] == [True] * len(members), layout


def test_another_layout_brings_no_values_of_other_ranks(four: Crew, folder: str) -> None:
    assert four.run(of_ranks.values_beside_blocks, folder=folder) == [True] * 4


@pytest.mark.parametrize(("layout", "why"), [("gap", "incomplete"), ("overlap", "overlap")])
def test_blocks_that_are_no_whole_come_back_to_their_ranks_alone(
    four: Crew, folder: str, tmp_path: Path, layout: str, why: str
) -> None:
    words = {"folder": folder, "layout": layout, "members": ALL}
    four.run(of_ranks.blocks, saves=True, **words)
    assert four.run(of_ranks.blocks, **words) == [True] * 4
    for error, text, untouched in four.run(
        of_ranks.blocks, folder=folder, layout="rows", members=ALL
    ):
        assert (error, untouched) == ("RestoreError", True)
        assert why in text
        assert "deep.w" in text
    with pytest.raises(tierfall.errors.RestoreError, match=why):
        tierfall.load(tmp_path / "pfs")


def test_replicas_that_differ_fail_the_save_and_come_back_to_their_ranks_alone(
    four: Crew, folder: str
) -> None:
    words = {"folder": folder, "layout": "own", "members": ALL}
    for first, second in four.run(of_ranks.blocks, saves=True, **words):
        assert (first[0], second[0]) == ("failed", "saved")
        assert "deep.w" in first[1] or "deep.half" in first[1]
    assert four.run(of_ranks.blocks, **words) == [True] * 4
    for found in four.run(of_ranks.blocks, folder=folder, layout="rows", members=[0, 1])[:2]:
        assert found[0] == "RestoreError"
        assert "differ" in found[1]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("by_dcp", [False, True])
def test_blocks_that_an_optimizer_steps_are_captured_lazily(
    four: Crew, folder: str, tmp_path: Path, by_dcp: bool
) -> None:
    found = four.run(of_ranks.blocks_that_train, folder=folder, steps=4, by_dcp=by_dcp)
    assert found == [3] * 4
    loaded = tierfall.load(tmp_path / "pfs")
    loaded.pop("rng", None)
    weight = torch.nn.Parameter(WHOLE.clone())
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    for _ in range(4):
        (weight**2).sum().backward()
        optimizer.step()
    moments = {**optimizer.state[weight]}
    del moments["step"]
    assert equal(loaded, {"weight": weight.detach(), **moments})


def test_sums_that_are_not_summed_up_and_fsdp1_are_refused_by_name(four: Crew, folder: str) -> None:
    for partial, fsdp1 in four.run(of_ranks.refused_states, folder=folder):
        assert partial[0] == fsdp1[0] == "CaptureError"
        assert "partial" in partial[1]
        assert "fully_shard" in fsdp1[1]


def test_values_go_where_on_resize_says(four: Crew, folder: str) -> None:
    members = [0, 1, 2, 3]
    drawn = four.run(of_ranks.values, folder=folder, members=members, saves=True)
    same = four.run(of_ranks.values, folder=folder, members=members, saves=False)
    for rank in members:
        own = 100 + rank
        assert same[rank] == [7, own, own, own, drawn[rank]], "with as many ranks each has its own"
    fewer = four.run(of_ranks.values, folder=folder, members=[0, 1], saves=False)
    for rank in (0, 1):
        assert fewer[rank][:4] == [7, 100 + rank, 100, rank]
        assert fewer[rank][4] not in drawn, "the random state fits no other number of ranks"
    folder = f"{folder}/two"
    four.run(of_ranks.values, folder=folder, members=[0, 1], saves=True)
    more = four.run(of_ranks.values, folder=folder, members=members, saves=False)
    for rank in members:
        assert more[rank][:4] == [7, 100 + rank if rank < 2 else rank, 100, rank]


def test_a_value_that_differed_is_named_if_another_number_of_ranks_restores(
    four: Crew, folder: str
) -> None:
    four.run(of_ranks.values_that_differ, folder=folder, members=[0, 1, 2, 3], saves=True)
    found = four.run(of_ranks.values_that_differ, folder=folder, members=[0, 1], saves=False)
    for rank in (0, 1):
        why, position, first = found[rank]
        assert "position" in why or "w" in why
        assert "on_resize" in why
        assert (position, first) == (-1, float(rank)), "nothing is restored"


# By torch.distributed.checkpoint, and for other programs ---------------------------------------------------


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_loop_that_saves_by_dcp_continues_on_as_many_ranks_and_on_fewer(
    four: Crew, folder: str
) -> None:
    """In its own layout, and in others."""
    words = {"folder": folder, "members": ALL}
    saved = four.run(of_ranks.train_by_dcp, until=2, lazily=True, **words)
    assert all(one["lazy"] > 0 for one in saved), "a LazyStager captures what the optimizer steps"
    for layout, members in (("fsdp", [0, 1]), ("tp", [0, 1]), ("hsdp", ALL), ("plain", [0])):
        found = four.run(
            of_ranks.train_by_dcp, folder=folder, until=2, members=members, layout=layout
        )
        for rank in members:
            assert (found[rank]["first"], found[rank]["digest"]) == (3, saved[0]["digest"]), layout
    again = four.run(of_ranks.train_by_dcp, until=3, **words)
    assert [(one["first"], one["restored"]) for one in again] == [(3, saved[0]["digest"])] * 4


def test_an_export_of_several_ranks_has_whole_tensors_and_the_values_of_each(
    folder: str, tmp_path: Path, trained: Trained
) -> None:
    _, digest = trained("tp-fsdp")
    for name, form in (("all.pt", "torch"), ("all.safetensors", "safetensors"), ("dcp", "dcp")):
        done = command(folder, "export", "2", "--to", str(tmp_path / name), "--format", form)
        assert done.code == 0, done.err
    loaded = torch.load(tmp_path / "all.pt", weights_only=False)
    assert of_ranks.digest_of(loaded) == digest
    assert loaded["per_rank"]["3"]["own"] == 103
    imported = command(folder, "import", str(tmp_path / "dcp"), "--as-step", "2", "--run", "whole")
    assert imported.code == 0, imported.err
    back = tierfall.load(tmp_path / "pfs" / "whole")
    assert equal(back["model"]["0.weight"], loaded["model"]["0.weight"])


def test_a_dcp_folder_of_several_ranks_is_imported_whole(
    four: Crew, folder: str, tmp_path: Path
) -> None:
    digest = four.run(of_ranks.save_by_torch_alone, path=str(tmp_path / "dcp"))[0]
    imported = command(folder, "import", str(tmp_path / "dcp"), "--as-step", "5")
    assert imported.code == 0, imported.err
    config = of_ranks.config(folder, "0")
    assert of_ranks.restore_in_one_process(config, "run") == [digest, 3]


# Stopped, killed and taken for others ---------------------------------------------------------------------


def test_no_save_waits_for_a_rank_that_stands_still_and_it_is_whole_once_that_is_back(
    four: Crew, folder: str, tmp_path: Path
) -> None:
    four.run(of_ranks.stay, folder=folder, steps=[1], wait="pfs")
    four.signal(0, signal.SIGSTOP)
    try:
        for rank in (1, 2, 3):
            four.tell(rank, of_ranks.save_timed, step=2)
        for rank in (1, 2, 3):
            took, timed_out = four.answer(rank)
            assert took < 10, "max_wait is 20 s"
            assert timed_out, "a wait ends when it was to end"
    finally:
        four.signal(0, signal.SIGCONT)
    four.tell(0, of_ranks.save_timed, step=2)
    four.answer(0)
    assert four.run(of_ranks.wait_and_leave) == [["saved", ""]] * 4
    assert committed(tmp_path, "pfs") == ["step-00000001-a0001", "step-00000002-a0001"]


def test_a_second_job_of_the_run_is_refused_on_its_node_and_fences_it_from_another(
    four: Crew, folder: str, tmp_path: Path
) -> None:
    four.run(of_ranks.stay, folder=folder, steps=[1], wait="pfs")
    with pytest.raises(LockError, match="process"):
        tierfall.open(of_ranks.config(folder, "0"))
    elsewhere = of_ranks.config(folder, "7")
    elsewhere["tiers"] = [tier for tier in elsewhere["tiers"] if tier["name"] != "nvme"]
    with tierfall.open(elsewhere, fresh=True) as ckpt:
        ckpt.save(5, of_ranks.own(0, 5), block=True)
        found = four.run(of_ranks.save_expecting_nothing, step=2)
    assert all(text.startswith(("FencedError", "FlushError")) for text in found), found
    assert any("FencedError" in text or "attempt 2" in text for text in found)
    assert committed(tmp_path, "pfs")[-1] == "step-00000005-a0002"


def test_a_killed_job_continues_and_no_step_mixes_two_attempts(tmp_path: Path) -> None:
    """It is killed while half of step 2 is on ``pfs``; its memory is lost, and step 2 is saved again."""
    folder = str(tmp_path)
    with crew(tmp_path, 2) as ranks:
        ranks.run(of_ranks.go_on, folder=folder, steps=[1], nvme=SELDOM)
        slow = {"nvme": SELDOM, "pfs": {"bandwidth": "4kB/s"}}
        ranks.run(of_ranks.stay, folder=folder, steps=[2], **slow)
        half = step_folder(tmp_path, "pfs", 2, attempt=2)
        wait_until(half.exists, "step 2 has begun on pfs")
        ranks.signal(1, signal.SIGKILL)
        ranks.signal(0, signal.SIGKILL)
    assert committed(tmp_path, "pfs") == ["step-00000001-a0001"]
    shutil.rmtree(tmp_path / "memory-0")
    with crew(tmp_path, 2) as ranks:
        found = ranks.run(of_ranks.go_on, folder=folder, steps=[2], nvme=SELDOM)
        assert [(one["step"], one["good"]) for one in found] == [(1, True)] * 2
        assert committed(tmp_path, "pfs") == ["step-00000001-a0001", "step-00000002-a0003"]
        assert not half.exists(), "half of it is nothing"
        found = ranks.run(of_ranks.go_on, folder=folder, nvme=SELDOM)
        assert [(one["step"], one["good"]) for one in found] == [(2, True)] * 2


def test_a_shard_of_another_job_in_a_steps_folder_is_not_taken_for_its_own(
    four: Crew, tmp_path: Path
) -> None:
    """Same run, step and attempt, by another job: its files are whole, and not of this checkpoint."""
    for name in ("one", "two"):
        four.run(of_ranks.go_on, folder=str(tmp_path / name), steps=[1, 2], nvme=SELDOM)
    for suffix in (".safetensors", ".json"):
        name = f"rank-00001-of-00004{suffix}"
        other = step_folder(tmp_path / "two", "pfs", 2) / name
        shutil.copyfile(other, step_folder(tmp_path / "one", "pfs", 2) / name)
    shutil.rmtree(tmp_path / "one" / "memory-0", ignore_errors=True)
    found = four.run(of_ranks.go_on, folder=str(tmp_path / "one"), nvme=SELDOM)
    assert [(one["step"], one["good"]) for one in found] == [(1, True)] * 4


def test_drain_on_each_node_brings_what_a_killed_job_left_there(tmp_path: Path) -> None:
    folder = str(tmp_path)
    slow = {"nvme": SELDOM, "pfs": {"bandwidth": "1kB/s"}, "max_wait": "3s"}
    with crew(tmp_path, 2, [0, 1]) as ranks:
        ranks.run(of_ranks.stay, folder=folder, steps=[1], **slow)
        for rank in range(2):
            ranks.signal(rank, signal.SIGKILL)
    fast = {"nvme": SELDOM, "max_wait": "1s"}
    first = command(folder, "drain", node="0", **fast)
    assert first.code == 1, "the image of the other node is missing"
    assert committed(tmp_path, "pfs") == []
    second = command(folder, "drain", node="1", **fast)
    assert second.code == 0, second.err
    assert committed(tmp_path, "pfs") == ["step-00000001-a0001"]
    assert command(folder, "drain", node="0", **fast).code == 0
    loaded = tierfall.load(tmp_path / "pfs", only=["step"])
    assert loaded["step"].item() == 1.0
