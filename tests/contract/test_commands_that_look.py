"""``ls``, ``latest``, ``runs``, ``show`` and ``watch``: what there is, what could not be read, and nothing changed."""

from __future__ import annotations

import json
import math
import shutil
import signal
import socket
from collections.abc import Iterator

import pytest

from tests.contract.kit import (
    IMAGE,
    MANIFEST,
    Place,
    blank,
    files_below,
    flip,
    folder_of,
    new_place,
    state_of,
    training_state,
)
from tests.contract.trainer import save


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Steps 1 to 4, then from 2 on again 3: 4@1 is left behind on ``far``, which survives more than ``disk``. The tests
    only read."""
    with new_place(tmp_path_factory.mktemp("lines")) as place:
        place.config(disk={}, far={"shared": True, "flush": {"every": 2}})
        with place.open() as ckpt:
            for step in range(1, 5):
                tags = ["best"] if step == 2 else []
                metrics = {"loss": 1 / step, "none": math.nan}
                ckpt.save(step, state_of(step), metrics=metrics, tags=tags, block=True)
            ckpt.drain()
        with place.open() as ckpt:
            ckpt.restore(blank(), step=2)
            ckpt.save(3, state_of(3), block=True)
            ckpt.pin(2)
        yield place


# ls ---------------------------------------------------------------------------------------------------


def test_ls_has_every_step_on_every_tier(lines: Place) -> None:
    document = lines.json("ls")
    assert document["owner"] is None
    assert lines.ls() == {
        "1@1": {"disk": "committed"},
        "2@1": {"disk": "committed", "far": "committed"},
        "3@2": {"disk": "committed"},
        "4@1": {"far": "committed"},
    }
    found = {f"{c['step']}@{c['attempt']}": c for c in document["checkpoints"]}
    assert (found["2@1"]["tags"], found["2@1"]["pinned"]) == (["best"], True)
    assert found["2@1"]["metrics"] == {"loss": 0.5, "none": "nan"}
    assert found["3@2"]["started_from"] == {"step": 2, "attempt": 1}
    assert [name for name, c in found.items() if c["abandoned"]] == ["4@1"]
    assert all(c["bytes"] > 80_000 and c["wall_time_s"] > 0 for c in found.values())
    assert [tier["name"] for tier in document["tiers"]] == ["host", "disk", "far"]
    assert [tier["error"] for tier in document["tiers"]] == [None] * 3
    assert document["tiers"][1]["place"] == str(lines.root / "disk")


def test_ls_for_people_has_a_line_for_every_step_and_what_a_loss_would_leave(lines: Place) -> None:
    text = lines.cli("ls", "--metrics").out
    words = {w[0]: w for line in text.splitlines() if (w := line.split())}
    assert words["STEP"][:6] == ["STEP", "AGE", "SIZE", "host", "disk", "far"]
    assert "loss" in words["STEP"]
    assert words["2@1"][-7:-5] == ["-", "committed"]
    assert words["2@1"][-2:] == ["#best,", "pinned"]
    assert words["4@1"][-1] == "abandoned"
    assert "if the process dies: 3@2 is left, on" in text
    assert "if the machine dies: 2@1 is left, on far" in text
    assert "loss" not in lines.cli("ls").out.partition("\n")[0]


def test_last_lists_the_newest_and_counts_the_others(lines: Place) -> None:
    assert [c["step"] for c in lines.json("ls", "-n", "2")["checkpoints"]] == [3, 4]
    text = lines.cli("ls", "--last", "2").out
    assert "2 older steps are not shown" in text
    assert "1@1" not in text
    assert "not shown" not in lines.cli("ls", "--last", "9").out


def test_ls_tells_what_is_damaged_and_what_is_unfinished(place: Place) -> None:
    place.config(disk={}, far={})
    save(place, 1, 2, 3)
    flip(folder_of(place, 1) / "commit.json", 40)
    (folder_of(place, 2) / IMAGE).unlink()
    shutil.copytree(folder_of(place, 3), folder_of(place, 9))
    (folder_of(place, 9) / "commit.json").unlink()
    answer = place.cli("ls", code=1)
    assert "1@1 is damaged" in answer.err
    assert "2@1 is damaged" in answer.err
    assert "unfinished" in answer.out
    assert place.ls() == {
        "1@1": {"disk": "damaged", "far": "committed"},
        "2@1": {"disk": "damaged", "far": "committed"},
        "3@1": {"disk": "committed", "far": "committed"},
    }
    assert place.json("ls", code=1)["tiers"][1]["unfinished"] == [{"step": 9, "attempt": 1}]


def test_a_step_folder_that_is_a_link_is_named_by_every_command_and_not_followed(
    place: Place,
) -> None:
    """Somebody moved it to an archive."""
    place.config()
    save(place, 1, 2)
    folder = folder_of(place, 2)
    folder.rename(place.root / "archived")
    folder.symlink_to(place.root / "archived")
    assert place.ls() == {"1@1": {"disk": "committed"}, "2@1": {"disk": "unreadable"}}
    for words in (["ls"], ["show", "2"], ["verify", "2"], ["rm", "2", "--yes"], ["latest"]):
        assert "symbolic link" in place.cli(*words, code=1).err, words
    assert (place.root / "archived" / "commit.json").exists()
    folder.unlink()
    (place.root / "archived").rename(folder)
    assert place.ls()["2@1"] == {"disk": "committed"}


# latest ------------------------------------------------------------------------------------------------


def test_latest_is_what_a_restore_takes(place: Place) -> None:
    place.config(disk={}, far={"flush": {"every": 2}})
    save(place, 1, 2, 3)
    found = place.json("latest")
    assert (found["step"], found["attempt"], found["tiers"]) == (3, 1, ["disk"])
    with place.open() as ckpt:
        ckpt.restore(blank(), step=1)
        ckpt.save(2, state_of(2), block=True)
    assert place.cli("latest").out == "2@2\n"
    report = place.restored()
    assert (report.step, report.attempt) == (2, 2)


def test_latest_passes_over_a_damaged_step_names_it_and_fails(place: Place) -> None:
    place.config()
    save(place, 1, 2, 3)
    (folder_of(place, 3) / IMAGE).unlink()
    answer = place.cli("latest", code=1)
    assert answer.out == "2@1\n"
    assert "3@1 is newer, and damaged" in answer.err
    assert place.cli("pin", "latest", code=1).out == "pinned 2@1 on disk\n"
    assert place.restored().step == 2


def test_without_a_step_that_can_be_restored_latest_prints_nothing_and_fails(place: Place) -> None:
    place.config()
    for words in (["latest"], ["show", "latest"], ["pin", "latest"], ["verify", "latest"]):
        answer = place.cli(*words, code=1)
        assert (answer.out, answer.err.count("\n")) == ("", 1)
        assert "no step that can be restored" in answer.err


def test_latest_is_not_guessed_while_an_unread_tier_may_hold_a_later_step(place: Place) -> None:
    place.config(disk={}, far={})
    save(place, 1, 2)
    shutil.rmtree(folder_of(place, 2))
    (place.root / "disk" / "run" / "latest").unlink()
    shutil.move(place.root / "far", place.root / "unmounted")
    answer = place.cli("latest", code=1)
    assert answer.out == "1@1\n"
    assert "tier far could not be read" in answer.err
    for words in (["pin", "latest"], ["show", "latest"], ["rm", "latest", "--yes"]):
        refused = place.cli(*words, code=1)
        assert refused.out == ""
        assert "far may hold a later step" in refused.err


# runs, show --------------------------------------------------------------------------------------------


def test_runs_are_those_of_all_tiers(place: Place) -> None:
    place.config(disk={}, far={"flush": {"every": 2}})
    save(place, 1, 2)
    with place.open(run="other") as ckpt:
        ckpt.save(7, state_of(7), block=True)
    (place.root / "disk" / "notes").mkdir()
    (place.root / "disk" / "readme.txt").write_text("no run")
    found = {one["run"]: one for one in place.json("runs")["runs"]}
    assert sorted(found) == ["other", "run"]
    one = found["run"]
    assert (one["checkpoints"], one["step"], one["attempt"]) == (2, 2, 1)
    assert one["tiers"] == ["disk", "far"]
    assert one["owner"] is None
    assert "2 runs" in place.cli("runs").out
    assert "other, run" in place.cli("ls", "--run", "third").out


def test_show_has_lineage_copies_decisions_tensors_and_files(place: Place) -> None:
    place.config(disk={"retain": {"last": 2}}, far={"flush": {"every": 3}})
    with place.open() as ckpt:
        for step in range(1, 4):
            ckpt.save(step, training_state(step), metrics={"loss": 0.25}, tags=["t"], block=True)
        ckpt.pin(2)
    shown = place.json("show", "3")
    assert (shown["step"], shown["attempt"], shown["ordinal"]) == (3, 1, 3)
    assert (shown["metrics"], shown["tags"], shown["owed"]) == ({"loss": 0.25}, ["t"], [])
    assert shown["started_from"] is None
    assert list(shown["copies"]) == ["disk", "far"]
    for copy in shown["copies"].values():
        assert (copy["state"], copy["decision"]["verdict"]) == ("committed", "keep")
        files = {file["name"]: file["bytes"] for file in copy["files"]}
        assert files.keys() == {"commit.json", MANIFEST, IMAGE}
        assert sum(files.values()) == copy["bytes"]
        assert files[IMAGE] == shown["bytes"] == (folder_of(place, 3) / IMAGE).stat().st_size
    (manifest,) = shown["manifests"]
    weight = {t["name"]: t for t in manifest["tensors"]}["model.0.weight"]
    assert (weight["shape"], weight["bytes"], weight["dtype"]) == ([128, 32], 16384, "float32")
    text = place.cli("show", "3").out
    for part in (
        "model.0.weight",
        "#t",
        "loss 0.25",
        IMAGE,
        "checkpoint 3 of this training, which started from nothing",
    ):
        assert part in text
    assert "pinned" in place.cli("show", "2").out


def test_an_abandoned_step_is_named_with_its_attempt(lines: Place) -> None:
    assert "4@1" in lines.cli("show", "4", code=1).err
    assert lines.json("show", "4@1")["abandoned"]
    assert lines.json("show", "3")["attempt"] == 2


def test_show_reads_a_good_manifest_and_says_which_is_damaged(place: Place) -> None:
    place.config(disk={}, far={})
    save(place, 1)
    flip(folder_of(place, 1) / MANIFEST, 40)
    answer = place.cli("show", "1", code=1)
    assert "tier disk" in answer.err
    assert MANIFEST in answer.err
    assert "float32" in answer.out


# watch -------------------------------------------------------------------------------------------------


def test_watch_shows_what_the_tiers_hold_without_a_trainer(lines: Place) -> None:
    found = lines.json("watch", "--once")
    assert (found["ok"], found["owner"]) == (True, None)
    tiers = {tier["name"]: tier for tier in found["tiers"]}
    assert tiers["disk"]["checkpoints"] == 3
    assert tiers["disk"]["used_bytes"] > 3 * 80_000
    assert found["newest"]["process"] == 3
    assert {c["step"]: list(c["copies"]) for c in found["checkpoints"]} == {
        1: ["disk"],
        2: ["disk", "far"],
        3: ["disk"],
        4: ["far"],
    }
    text = lines.cli("watch", "--once").out
    assert "no trainer is alive on this machine" in text
    assert "if the process dies: 3@2 is left, on disk" in text


def test_each_frame_of_watch_is_one_line_of_json_until_ctrl_c_which_is_how_it_ends(
    place: Place,
) -> None:
    place.config()
    save(place, 1)
    watching = place.begin("watch", "--json", "--every", "100ms")
    first, second = (json.loads(watching.line()) for _ in range(2))
    assert first["ok"]
    assert second["wall_time_s"] > first["wall_time_s"]
    watching.signal(signal.SIGINT)
    assert watching.end().code == 0


def test_the_last_events_come_from_the_event_log(place: Place) -> None:
    place.config(events=str(place.root / "events.jsonl"))
    save(place, 1)
    with (place.root / "events.jsonl").open("ab") as log:
        log.write(b'{"torn')
    kinds = [event["kind"] for event in place.json("watch", "--once")["events"]]
    assert "committed" in kinds
    assert kinds[-1] == "closed"


# Nothing is changed, and nothing is created --------------------------------------------------------------


def test_looking_changes_nothing(place: Place) -> None:
    place.config(disk={"retain": {"last": 1}}, host={"on_close": "keep"})
    save(place, 1, 2)
    before = files_below(place.root), files_below(place.memory)
    for words in (
        *(["ls"], ["latest"], ["runs"], ["show", "2"], ["verify"], ["watch", "--once"]),
        ["prune", "--dry-run"],
    ):
        place.cli(*words)
    assert (files_below(place.root), files_below(place.memory)) == before


def test_before_the_first_training_there_is_nothing_to_do_and_nothing_is_created(
    place: Place,
) -> None:
    place.config(disk={}, far={})
    before = sorted(place.root.rglob("*"))
    for words in (
        *(["ls"], ["runs"], ["verify"], ["prune"], ["drain"], ["drain", "--deadline", "5s"]),
        *(["check", "--size", "64KiB"], ["watch", "--once"], ["forget", "disk"]),
    ):
        assert place.cli(*words).err == "", words
    assert "not created yet" in place.cli("ls").out
    tiers = place.json("ls")["tiers"]
    assert [(t["not_created"], t["error"]) for t in tiers[1:]] == [(True, None)] * 2
    for command in ("pin", "rm"):
        assert "step 1 is not there" in place.cli(command, "1", code=1).err
    assert sorted(place.root.rglob("*")) == before
    assert list(place.memory.iterdir()) == []


def test_a_tier_that_is_new_in_the_file_is_not_created_yet_and_one_that_was_used_is_away(
    place: Place,
) -> None:
    place.config(disk={})
    save(place, 1)
    place.config(disk={}, far={})
    assert "not created yet" in place.cli("ls").out
    assert place.cli("latest").out == "1@1\n"
    save(place, 2)
    shutil.move(place.root / "far", place.root / "unmounted")
    answer = place.cli("ls", code=1)
    assert "tier far could not be read" in answer.err
    assert "if the site is lost: nothing is left\nnot read: far\n" in answer.out
    assert "not created yet" not in answer.out


def test_what_a_store_that_does_not_answer_may_hold_is_not_called_absent(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = f"http://127.0.0.1:{taken.getsockname()[1]}"
    options = {"endpoint_url": server, "key": "k", "secret": "s"}
    place.config(store={"kind": "object", "url": "s3://bucket/x", "options": options})
    for words in (["ls"], ["latest"], ["runs"]):
        answer = place.cli(*words, code=1)
        assert "(not read: store)" in answer.out + answer.err
        assert "is endpoint_url right?" in answer.err


def test_a_folder_that_no_training_creates_could_not_be_read(place: Place) -> None:
    """A tier that is only read, and a shared one whose file system is not mounted."""
    place.config(disk={})
    save(place, 1)
    for name, settings in (
        ("archive", {"read_only": True}),
        ("lustre", {"shared": True, "path": str(place.root / "mnt" / "checkpoints")}),
    ):
        place.config(disk={}, **{name: settings})
        for word in ("ls", "latest"):
            answer = place.cli(word, code=1)
            assert name in answer.err
            assert "not created yet" not in answer.out


def test_a_tier_that_goes_away_while_the_run_trains_could_not_be_read(place: Place) -> None:
    place.config(host={"on_close": "keep"}, max_wait="1s")
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        shutil.move(place.root / "disk", place.root / "lost")
    answer = place.cli("ls", code=1)
    assert "tier disk could not be read" in answer.err
    assert "not created yet" not in answer.out
    assert "tier disk" in place.cli("runs", code=1).err
