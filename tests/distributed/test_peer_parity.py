"""Jobs with parity in peer memory: as many nodes of a group may be lost as it is for, without a read from storage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.distributed.job import stopped, wait_for
from tests.distributed.peer_jobs import (
    NODES,
    PROGRAM,
    STORED,
    MakeJob,
    check_resumed,
    invoked,
    lose,
    run_again,
    shown,
    train,
)

LONG = pytest.mark.torture
ONE = {"parity": {"group": 4, "losses": 1}}
TWO = {"parity": {"group": 4, "losses": 2}}
SELDOM = {"flush": {"every": 100}}


@pytest.mark.parametrize("lost", [1, *(pytest.param(node, marks=LONG) for node in (0, 2, 3))])
def test_any_node_is_lost(make_job: MakeJob, tmp_path: Path, lost: int) -> None:
    train(make_job, peers=ONE)
    _, survives = json.loads((tmp_path / f"survives-{lost}").read_text())
    assert (survives["step"], survives["certain"]) == (3, 1)
    lose(tmp_path, lost)
    answers = run_again(make_job, peers=ONE)
    check_resumed(answers, step=3)
    assert answers[lost]["tiers"].keys() == {"host"}, answers  # it was rebuilt there


@pytest.mark.parametrize("lost", [(0, 1), pytest.param((1, 3), marks=LONG)])
def test_any_two_nodes_are_lost(make_job: MakeJob, tmp_path: Path, lost: tuple[int, int]) -> None:
    train(make_job, peers=TWO)
    for node in lost:
        lose(tmp_path, node)
    check_resumed(run_again(make_job, peers=TWO), step=3)


def test_more_nodes_than_that_cost_the_steps_since_storage(
    make_job: MakeJob, tmp_path: Path
) -> None:
    train(make_job, peers=ONE)
    for node in (1, 2):
        lose(tmp_path, node)
    answers = run_again(make_job, peers=ONE)
    check_resumed(answers, step=2, reads="pfs")


def test_commands_on_one_node_list_what_it_keeps(make_job: MakeJob, tmp_path: Path) -> None:
    """They read no image of parity, which takes other nodes: the next start does."""
    train(make_job, peers=ONE)
    (newest,) = [
        line for line in shown(tmp_path, "ls", **ONE).splitlines() if line.startswith(" 3@1")
    ]
    assert newest.split()[-3:] == ["sealed", "committed", "owed"]
    verified = invoked(tmp_path, "verify", **ONE)
    assert "3@1  peers       0      0 B  could not be read" in verified.output
    assert "only the ranks of a start read: start the training again" in verified.output
    assert "nothing is damaged" in verified.output
    drained = invoked(tmp_path, "drain", "--deadline", "2s", **ONE)
    assert "this machine's images are there, other ranks' are not yet" in drained.output
    check_resumed(run_again(make_job, peers=ONE), step=3)


def test_parity_takes_its_share_of_an_image(make_job: MakeJob, tmp_path: Path) -> None:
    """No copy of an image is in any node's memory but its own's. Parity of 1 / 3 of the image is on each."""
    train(make_job, peers=ONE)
    assert not list(tmp_path.glob("peers-*/**/*.safetensors"))
    for node in NODES:
        newest = max(tmp_path.glob(f"peers-{node}/*/parity/many/step-*/*.parity"))
        image = next(tmp_path.glob("pfs/many/step-*/rank-00000-*.safetensors")).stat().st_size
        assert abs(newest.stat().st_size - image / 3) <= 4096  # a block of the program


def test_a_node_that_is_lost_while_training_goes_on(make_job: MakeJob, tmp_path: Path) -> None:
    """Its images are restored, also where the next start saves and is killed again, with another node lost."""
    train(make_job, peers=ONE)
    lose(tmp_path, 1)
    job = make_job(4, NODES, program=PROGRAM).start("train", steps=[4, 5], pfs=STORED, peers=ONE)
    job.wait_ready()
    job.kill()
    lose(tmp_path, 2)
    check_resumed(run_again(make_job, peers=ONE), step=5)


def test_the_first_step_after_a_loss_makes_the_parity_again(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """Without it, the loss of another node would cost all steps since the last one on storage."""
    train(make_job, peers=ONE)
    lose(tmp_path, 1)
    seldom = {"interval": {"every": 1000, "at_end": False}}
    job = make_job(4, NODES, program=PROGRAM).start("go_on", saved="saved", peers=ONE, **seldom)
    job.wait_ready()
    job.kill()
    step = int((tmp_path / "saved").read_text())
    assert 3 < step < 40
    lose(tmp_path, 2)
    check_resumed(run_again(make_job, peers=ONE), step=step)


def test_a_kill_in_mid_transfer_leaves_the_checkpoint_before(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """Its images are still in memory, too, though newer ones need room there: its parity is of no use without them."""
    job = make_job(4, NODES, program=PROGRAM)
    more = {"pfs": SELDOM, "peers": ONE, "max_wait": "6s"}
    job.start("train", steps=[1, 2, 3], stuck=3, after=[4, 5], **more).wait_ready()
    job.kill()
    lose(tmp_path, 1)
    check_resumed(run_again(make_job, peers=ONE), step=2)


def test_several_ranks_of_a_node(make_job: MakeJob, tmp_path: Path) -> None:
    """Ranks with the same place on their nodes keep the parity of each other's images."""
    two = {"parity": {"group": 2, "losses": 1}}
    job = make_job(4, [0, 0, 1, 1], program=PROGRAM)
    job.start("train", steps=[1, 2, 3], wait="pfs", pfs=STORED, peers=two).wait_ready()
    job.kill()
    lose(tmp_path, 0)
    answers = make_job(4, [0, 0, 1, 1], program=PROGRAM).run("resume", pfs=STORED, peers=two)
    check_resumed(answers, step=3)
    assert [set(answer["tiers"]) for answer in answers[:2]] == [{"host"}] * 2


def test_fewer_nodes_go_on(make_job: MakeJob, tmp_path: Path) -> None:
    """The groups of the next start are other ones; what the earlier ones keep is rebuilt by theirs."""
    train(make_job, peers=ONE)
    lose(tmp_path, 3)
    job = make_job(3, [0, 1, 2], program=PROGRAM)
    smaller = {"parity": {"group": 3, "losses": 1}}
    answers = job.run("resume_any", pfs=STORED, peers=smaller)
    assert [answer.get("step") for answer in answers] == [3] * 3, answers
    assert all(answer["good"] and "pfs" not in answer["tiers"] for answer in answers)


@LONG
def test_the_memory_of_two_machines_is_exchanged(make_job: MakeJob, tmp_path: Path) -> None:
    """The ranks come to other machines than before, and one machine is lost."""
    train(make_job, peers=ONE)
    for kept in ("memory", "peers"):
        (tmp_path / f"{kept}-1").rename(tmp_path / "aside")
        (tmp_path / f"{kept}-2").rename(tmp_path / f"{kept}-1")
        (tmp_path / "aside").rename(tmp_path / f"{kept}-2")
    lose(tmp_path, 1)
    check_resumed(run_again(make_job, peers=ONE), step=3)


@pytest.mark.parametrize("nodes", [NODES, pytest.param([0, 0, 1, 1], marks=LONG)])
def test_a_clean_close_frees_the_memory_of_all_nodes(
    make_job: MakeJob, tmp_path: Path, nodes: list[int]
) -> None:
    parity = {"parity": {"group": len(set(nodes)), "losses": 1}}
    job = make_job(4, nodes, program=PROGRAM)
    assert job.run("finish", steps=[1, 2, 3, 4], pfs=STORED, peers=parity) == [4] * 4
    left = [path for path in tmp_path.glob("peers-*/**/*") if "step-" in str(path)]
    assert left == []
    job = make_job(4, nodes, program=PROGRAM)
    check_resumed(job.run("resume", pfs=STORED, peers=parity), step=4, reads="pfs")


def test_a_replaced_node_has_room_for_as_many_images_as_before(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """Its image was brought back, and it saved two more: what parity counts on is in its memory while the next one is
    sent, and restores what another node loses."""
    train(make_job, peers=ONE)
    lose(tmp_path, 3)
    job = make_job(4, NODES, program=PROGRAM)
    job.start("train", steps=[4, 5], stuck=5, pfs=SELDOM, peers=ONE).wait_ready()
    job.kill()
    lose(tmp_path, 2)
    answers = make_job(4, NODES, program=PROGRAM).run("resume", pfs=SELDOM, peers=ONE)
    check_resumed(answers, step=4)


@pytest.mark.parametrize("nodes", [NODES, [0, 0, 1, 1]])
def test_the_parity_of_older_checkpoints_is_deleted(
    make_job: MakeJob, tmp_path: Path, nodes: list[int]
) -> None:
    parity = {"parity": {"group": len(set(nodes)), "losses": 1}}
    job = make_job(4, nodes, program=PROGRAM)
    job.start("train", steps=[1, 2, 3, 4, 5], pfs=SELDOM, peers=parity).wait_ready()
    job.kill()
    for node in set(nodes):
        steps = {path.parent.name for path in tmp_path.glob(f"peers-{node}/*/parity/**/*.parity")}
        assert "step-00000005-a0001" in steps
        assert len(steps) <= 2, "the one before may be in deletion"


@LONG
def test_a_node_that_stands_still_in_a_transfer_is_waited_for(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """Training goes on, the handle says why, and the tier catches up once the node goes on. Memory has three images."""
    two = {"parity": {"group": 2, "losses": 1}, "max_wait": "4s"}
    job = make_job(2, [0, 1], program=PROGRAM)
    job.start("outlast", max_wait="30s", peers=two, host={"capacity": "600KiB"})
    wait_for(job, tmp_path / "sending")
    with stopped(job, 1):
        wait_for(job, tmp_path / "behind")
    answers = job.wait()
    assert answers[0]["blocked_s"] < 5, answers
    assert "flush of 2@1 to peers failed and is still being tried" in answers[0]["why"]
    assert "timed out" in answers[0]["why"]


def test_parity_that_does_not_fit_says_how_much_is_lacking(
    make_job: MakeJob, tmp_path: Path
) -> None:
    two = {"parity": {"group": 2, "losses": 1}}
    job = make_job(2, [0, 1], program=PROGRAM)
    answers = job.run("short_of_memory", on=1, free=50_000, peers=two)
    # Of either rank: both have something to keep in that memory, and the first one to find it short is named.
    lacking = re.search(
        r"it needs [\d.]+ KiB \((\d+) bytes\), and 48.8 KiB \(50000 bytes\) are free for it on",
        answers[0]["why"],
    )
    assert lacking is not None, answers[0]["why"]
    assert 140_000 < int(lacking[1]) < 150_000
    assert [answer["stored"] for answer in answers] == [[1, 2], [1, 2]]


def test_copies_of_an_earlier_start_are_restored_from(make_job: MakeJob, tmp_path: Path) -> None:
    """A run with two copies continues with parity after the loss of two nodes: the copies are restored."""
    job = make_job(3, [0, 1, 2], program=PROGRAM)
    job.start("train", steps=[1, 2, 3], peers={"copies": 2}).wait_ready()
    job.kill()
    for node in (1, 2):
        lose(tmp_path, node)
    parity = {"parity": {"group": 3, "losses": 1}}
    verified = shown(tmp_path, "verify", **parity)
    assert re.search(r"3@1 +peers .* good", verified), verified
    job = make_job(3, [0, 1, 2], program=PROGRAM)
    job.start("train", steps=[4, 5], peers=parity).wait_ready()
    job.kill()
    copies = [*tmp_path.glob("peers-*/*/[0-9]/many/step-*/*.safetensors")]
    assert copies == [], "none is left once there is parity of newer checkpoints"
    lose(tmp_path, 0)
    check_resumed(make_job(3, [0, 1, 2], program=PROGRAM).run("resume", peers=parity), step=5)
