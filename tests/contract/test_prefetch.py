"""``tierfall prefetch``: what a restore will read comes to a disk of this node before its job starts."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.contract.kit import IMAGE, Place, blank, files_below, flip, state_of, step_in, wait_until

CHUNK, ELEMENTS = 64 << 10, 1 << 20
"""Of an image of 4 MiB in 65 chunks."""
NVME = {"shared": False}
FAR = {"shared": True}


def saved(place: Place, *steps: int, elements: int = ELEMENTS, **tiers: Any) -> None:
    """The steps are on ``far`` alone, as another node has left them; this node's disk is new."""
    chain = {"nvme": NVME, "far": FAR, **tiers}
    place.config(host={"capacity": "64MiB"}, **chain)
    with place.open() as ckpt:
        for step in steps:
            ckpt.save(step, state_of(step, elements=elements), block=True)
    forget_this_node(place)


def forget_this_node(place: Place) -> None:
    shutil.rmtree(place.memory)
    place.memory.mkdir()
    for disk in place.root.glob("nvme*"):
        shutil.rmtree(disk)


def restored_from(place: Place, elements: int = ELEMENTS) -> tuple[int, list[str]]:
    state = blank(elements=elements)
    with place.open() as ckpt:
        report = ckpt.restore(state)
        assert report is not None
        assert step_in(state) == report.step
        return report.step, [source.tier for source in report.sources]


def unfinished(place: Place, step: int) -> bytes:
    """What has arrived of an image on ``nvme``."""
    folder = place.root / "nvme" / "run" / f"step-{step:08d}-a0001"
    found = [path.read_bytes() for path in folder.glob(".*")] if folder.exists() else []
    return found[0] if found else b""


def arrived(place: Place, step: int) -> int:
    """How many bytes of whole chunks that is."""
    there = unfinished(place, step)
    image = (place.root / "far" / "run" / f"step-{step:08d}-a0001" / IMAGE).read_bytes()
    starts = range(0, len(there), CHUNK)
    return sum(CHUNK for at in starts if there[at : at + CHUNK] == image[at : at + CHUNK])


def test_a_first_start_is_not_held_up_and_what_is_there_is_not_brought_twice(place: Place) -> None:
    place.config(nvme=NVME, far=FAR)
    assert "there is no checkpoint yet" in place.cli("prefetch").out
    assert not (place.root / "nvme").exists()
    saved(place, 1, 2)
    done = place.json("prefetch")
    assert (done["step"], done["tier"], list(done["sources"])) == (2, "nvme", ["far"])
    assert done["sources"]["far"] >= done["bytes"]
    assert restored_from(place) == (2, ["nvme"])
    before = files_below(place.root / "nvme")
    again = place.json("prefetch")
    assert (again["tier"], again["already"]) == (None, True)
    assert files_below(place.root / "nvme") == before
    assert place.json("prefetch", "1")["step"] == 1
    assert place.steps("nvme") == [1, 2]
    assert "no checkpoint of step 7" in place.cli("prefetch", "7", code=1).err


def test_killed_and_called_again_it_goes_on_from_what_has_arrived(place: Place) -> None:
    saved(place, 1, far={**FAR, "read_bandwidth": "4MB/s"})
    program = place.begin("prefetch")
    wait_until(lambda: arrived(place, 1) > 8 * CHUNK, "some chunks have arrived")
    program.kill()
    there = arrived(place, 1)
    place.config(nvme=NVME, far=FAR)
    done = place.json("prefetch")
    assert 0 < done["sources"]["far"] <= done["bytes"] - there
    assert restored_from(place) == (1, ["nvme"])


def test_what_arrived_and_was_damaged_since_is_read_again(place: Place) -> None:
    saved(place, 1, far={**FAR, "read_bandwidth": "4MB/s"})
    program = place.begin("prefetch")
    wait_until(lambda: arrived(place, 1) > 8 * CHUNK, "some chunks have arrived")
    program.kill()
    (left,) = (place.root / "nvme" / "run" / "step-00000001-a0001").glob(".*")
    left.write_bytes(bytes(byte ^ 1 for byte in left.read_bytes()))
    place.config(nvme=NVME, far=FAR)
    done = place.json("prefetch")
    assert done["sources"]["far"] >= done["bytes"]
    assert restored_from(place) == (1, ["nvme"])


@pytest.mark.parametrize("shared", [False, None])
def test_beside_a_trainer_of_another_node_and_of_this_one(
    place: Place, shared: bool | None, tmp_path: Path
) -> None:
    """A spare node gets its copy, unless the trainer may write the same folder; the trainer goes on."""
    nvme = {} if shared is None else {"shared": shared}
    saved(place, 1, nvme=nvme)
    here = json.loads(place.yaml.read_text())
    there = json.loads(place.yaml.read_text())
    there["tiers"][0]["folder"] = str(tmp_path / "memory of the other node")
    there["tiers"][1]["path"] = str(tmp_path / "disk of the other node")
    place.write(there)
    trainer = place.start(
        """
        import socket
        socket.gethostname = lambda: "other"
        with tierfall.open("tiers.yaml") as ckpt:
            ckpt.restore(blank(elements=1 << 20))
            ckpt.save(2, state_of(2, elements=1 << 20), block=True)
            print("saved", flush=True)
            sys.stdin.readline()
            ckpt.save(3, state_of(3, elements=1 << 20), block=True)
        """
    )
    assert trainer.line() == "saved", trainer.errors()
    beside = place.cli("prefetch")
    assert f"a trainer owns it here (process {trainer.pid} " in beside.out
    place.write(here)
    if shared is None:
        (place.root / "nvme").mkdir()
        refused = place.cli("prefetch", code=1)
        assert "say shared: false" in refused.err
        assert files_below(place.root / "nvme") == {}
    else:
        done = place.json("prefetch")
        assert (done["step"], done["tier"]) == (2, "nvme")
        assert place.folders("nvme")[-1].name.startswith("step-00000002")
    ended = trainer.end(input="go\n")
    assert ended.code == 0, ended.err
    assert place.folders("far")[-1].name.startswith("step-00000003")


def test_a_run_that_is_deleted_meanwhile_is_not_brought_back(place: Place) -> None:
    """By a command on another node."""
    saved(place, 1, far={**FAR, "read_bandwidth": "4MB/s"})
    program = place.begin("prefetch")
    wait_until(lambda: arrived(place, 1) > 2 * CHUNK, "some chunks have arrived")
    another = Place(place.root, place.root / "memory of another node")
    another.config(far=FAR)
    another.cli("rm", "--run", "run", "--all", input="run\n")
    place.config(nvme=NVME, far=FAR)
    ended = program.end()
    assert (ended.code, len(ended.err.splitlines())) == (1, 1), ended.err
    assert not place.folders("nvme")
    assert "there is no checkpoint yet" in place.cli("prefetch").out


def test_a_step_whose_deletion_has_begun_meanwhile_gives_way_to_an_older_one(place: Place) -> None:
    """Its commit record goes first, and its images are still read."""
    saved(place, 1, 2, far={**FAR, "read_bandwidth": "4MB/s"})
    program = place.begin("prefetch")
    wait_until(lambda: arrived(place, 2) > 2 * CHUNK, "some chunks have arrived")
    (place.root / "far" / "run" / "latest").unlink()
    (place.root / "far" / "run" / "step-00000002-a0001" / "commit.json").unlink()
    ended = program.end()
    assert ended.code == 0, ended.err
    assert "2@1 was deleted while it was read" in ended.out
    assert place.steps("nvme") == [1]
    assert not list((place.root / "nvme").glob("run/step-00000002*"))


def test_what_is_damaged_everywhere_is_passed_over_as_by_a_restore(place: Place) -> None:
    saved(place, 1, 2)
    image = place.root / "far" / "run" / "step-00000002-a0001" / IMAGE
    flip(image, 3 << 20)
    done = place.json("prefetch")
    assert (done["step"], done["tier"]) == (1, "nvme")
    assert "2@1 is passed over" in done["notes"][0]
    assert not list((place.root / "nvme").glob("run/step-00000002*"))
    assert "damaged in every copy" in place.cli("prefetch", "2", code=1).err


def test_the_fastest_disk_with_room_gets_it(place: Place) -> None:
    saved(place, 1)
    small = {**NVME, "capacity": "3MiB"}
    place.config(nvme=small, nvme2=NVME, far=FAR)
    assert place.json("prefetch")["tier"] == "nvme2"
    forget_this_node(place)
    place.config(nvme={**NVME, "keep_free": "99.9%"}, nvme2=NVME, far=FAR)
    assert place.json("prefetch")["tier"] == "nvme2"
    place.config(nvme=small, nvme2=small, far=FAR)
    forget_this_node(place)
    refused = place.cli("prefetch", code=1)
    assert "prefetch to nvme: it needs" in refused.err
    assert "prefetch to nvme2: it needs" in refused.err
    assert place.json("prefetch", "--to", "far")["already"]
    assert "only the trainer writes" in place.cli("prefetch", "--to", "host", code=2).err
    place.config(far=FAR)
    assert "no tier is a disk of this node" in place.cli("prefetch").out


def test_an_end_by_a_signal_leaves_what_has_arrived(place: Place) -> None:
    """As a prolog's time limit ends it."""
    saved(place, 1, far={**FAR, "read_bandwidth": "4MB/s"})
    program = place.begin("prefetch")
    wait_until(lambda: arrived(place, 1) > 2 * CHUNK, "some chunks have arrived")
    program.signal(signal.SIGTERM)
    program.end()
    assert arrived(place, 1) > 0


def test_a_training_that_starts_meanwhile_is_not_held_up(place: Place) -> None:
    saved(place, 1, far={**FAR, "read_bandwidth": "2MB/s"})
    program = place.begin("prefetch")
    wait_until(lambda: arrived(place, 1) > 2 * CHUNK, "some chunks have arrived")
    place.config(nvme=NVME, far=FAR, host={"capacity": "64MiB"}, max_wait="2s")
    with place.open() as ckpt:
        state = blank(elements=ELEMENTS)
        report = ckpt.restore(state)
        assert report is not None
        assert (report.step, step_in(state)) == (1, 1)
        ended = program.end()
        assert ended.code == 1
        assert "a newer start of the run goes on without it" in ended.err
        ckpt.save(2, state_of(2, elements=ELEMENTS), block=True)
    assert place.folders("nvme")[-1].name == "step-00000002-a0002"
    assert place.folders("far")[-1].name == "step-00000002-a0002"
    assert "nothing is damaged" in place.cli("verify").out
