"""Commands beside a living trainer, and after one that was killed: ``drain``, and the hooks of ``examples/``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from tests.contract.kit import (
    ROOT,
    Log,
    Place,
    blank,
    files_below,
    folder_of,
    state_of,
    tierfall_command,
    wait_until,
)
from tests.contract.trainer import Trainer, save, trainers

SLOW = {"bandwidth": "4kB/s"}
"""A tier that has not finished a copy when the trainer is killed."""


@pytest.fixture
def train(place: Place) -> Iterator[Callable[..., Trainer]]:
    with trainers(place) as start:
        yield start


# Beside a living trainer -------------------------------------------------------------------------------


def test_a_living_trainer_is_seen_and_commands_that_would_disturb_it_are_refused(
    place: Place, train: Callable[..., Trainer]
) -> None:
    place.config(disk={"retain": {"last": 2}}, far={"flush": {"every": 2}})
    trainer = train()
    for step in (1, 2):
        trainer.tell(f"save {step}")
    torch.save({"w": torch.ones(3)}, place.root / "x.pt")
    before = files_below(place.root)
    document = place.json("ls")
    assert document["owner"]["pid"] == trainer.pid
    copies = {c["step"]: c["copies"] for c in document["checkpoints"]}[2]
    found = {tier: copy["state"] for tier, copy in copies.items()}
    assert found == {"host": "sealed", "disk": "committed", "far": "committed"}
    assert place.json("runs")["runs"][0]["owner"]["pid"] == trainer.pid
    for words in (
        *(["prune"], ["drain"], ["forget", "far"], ["copy", "1", "--to", "far"]),
        *(["verify", "--repair"], ["import", "x.pt", "--as-step", "9"]),
        ["rm", "--run", "run", "--all"],
    ):
        answer = place.cli(*words, code=1, input="run\n")
        assert str(trainer.pid) in answer.err, words
        assert answer.err.count("\n") == 1
    for words in (["prune", "--dry-run"], ["verify"], ["show", "2"], ["check", "--size", "64KiB"]):
        assert place.json(*words)["ok"]
    place.cli("export", "latest", "--to", str(place.memory / "out"))
    assert files_below(place.root) == before
    trainer.close()
    assert place.json("ls")["owner"] is None


def test_a_trainer_heeds_pin_unpin_and_rm_after_its_next_commit(
    place: Place, train: Callable[..., Trainer]
) -> None:
    place.config(disk={"retain": {"last": 2}}, far={"flush": {"every": 2}})
    trainer = train()
    for step in (1, 2):
        trainer.tell(f"save {step}")
    answer = place.cli("pin", "2")
    assert answer.out.startswith("pinned 2@1 on disk, far")
    assert str(trainer.pid) in answer.out
    for step in (3, 4, 5):
        trainer.tell(f"save {step}")
    assert trainer.tell("pinned") == [2]
    assert place.steps("disk") == [2, 4, 5]
    assert "unpin" in place.cli("rm", "2", code=1).err
    assert place.json("unpin", "2")["left_to"]["pid"] == trainer.pid
    assert "marked 4@1 for deletion on disk, far" in place.cli("rm", "4").out
    assert {"disk", "far"} <= place.ls()["4@1"].keys(), "the trainer alone deletes"
    for step in (6, 7):
        trainer.tell(f"save {step}")
    assert place.steps("disk") == [6, 7]
    assert place.steps("far") == [2, 6]
    assert 4 not in trainer.tell("steps"), "it left the trainer's memory too"
    trainer.close()
    assert place.json("verify")["ok"]


def test_what_only_the_trainers_memory_holds_cannot_be_pinned_from_outside(
    place: Place, train: Callable[..., Trainer]
) -> None:
    place.config(disk={"flush": {"every": 2}})
    trainer = train()
    trainer.tell("capture 1")
    for words in (["pin", "1"], ["unpin", "1"], ["rm", "1", "--yes", "--even-the-last"]):
        assert "memory" in place.cli(*words, code=1).err
    exported = place.json("export", "1", "--to", str(place.root / "out"))
    assert list(exported["sources"]) == ["host"]
    trainer.tell("save 2")
    trainer.tell("pin 2")
    assert "unpinned 2@1 on disk" in place.cli("unpin", "2").out
    for step in (3, 4):
        trainer.tell(f"save {step}")
    wait_until(lambda: trainer.tell("pinned") == [], "its memory is unpinned, too")


def test_watch_and_ls_show_what_the_trainer_says(
    place: Place, train: Callable[..., Trainer]
) -> None:
    place.config(disk={"capacity": "1GiB"}, far={"flush": {"every": 2}})
    trainer = train()
    for step in (1, 2):
        trainer.tell(f"save {step}")

    def is_there() -> bool:
        found.update(place.json("watch", "--once"))
        newest = [c for c in found["checkpoints"] if c["step"] == 2]
        return bool(newest) and newest[0]["copies"].get("far", {}).get("state") == "committed"

    found: dict[str, object] = {}
    wait_until(is_there, "the trainer says that step 2 is on far")
    document = place.json("watch", "--once")
    (slot,) = document["slots"]
    assert (slot["alive"], slot["pid"], slot["rank"], slot["world_size"]) == (
        *(True, trainer.pid),
        *(0, 1),
    )
    tiers = {tier["name"]: tier for tier in document["tiers"]}
    assert tiers["disk"]["capacity_bytes"] == 1 << 30
    assert (tiers["disk"]["checkpoints"], tiers["far"]["checkpoints"]) == (2, 1)
    assert tiers["host"]["capacity_bytes"] >= tiers["host"]["used_bytes"] > 0
    assert document["newest"]["process"] == 2
    assert document["loss_bound"]["process"]["steps_lost"] == 0
    assert document["loss_bound"]["process"]["tier"] == "host"
    assert "committed" in [event["kind"] for event in document["events"]]
    assert place.json("ls")["loss_bound"]["process"] == document["loss_bound"]["process"]
    text = place.cli("watch", "--once").out
    assert f"trained by process {trainer.pid}" in text
    assert "if the process dies: 2@1 is left, on host" in text
    trainer.kill()
    text = place.cli("watch", "--once").out
    assert "no trainer is alive on this machine" in text
    assert f"process {trainer.pid} has ended" in text


def test_what_a_killed_trainer_did_not_heed_any_more_is_done_by_the_next_start(
    place: Place, train: Callable[..., Trainer]
) -> None:
    """On every tier, memory included."""
    place.config(disk={"retain": {"last": 2}}, far={"flush": {"every": 2}})
    trainer = train()
    for step in (1, 2):
        trainer.tell(f"save {step}")
    trainer.program.signal(signal.SIGSTOP)  # as a machine that hangs, and is lost
    place.cli("rm", "1")
    place.cli("pin", "2")
    trainer.kill()
    assert place.ls()["1@1"].keys() == {"host", "disk"}, "the trainer was to delete it"
    again = train()
    assert again.restored == 2
    for step in (3, 4, 5):
        again.tell(f"save {step}")
    assert again.tell("pinned") == [2]
    assert 1 not in again.tell("steps")
    again.close()
    assert (place.steps("disk"), place.steps("far")) == ([2, 4, 5], [2, 4])
    assert "1@1" not in place.ls()


# After a killed trainer: drain ---------------------------------------------------------------------------


@pytest.fixture
def died(place: Place, train: Callable[..., Trainer]) -> Callable[..., None]:
    """``died(1, 2)``: a trainer was killed with these steps in memory; from then on ``far`` is as fast as it can."""

    def die(*steps: int) -> None:
        place.config(disk={"flush": {"every": 2}}, far=SLOW, max_wait="5s")
        trainer = train()
        for step in steps:
            trainer.tell(f"capture {step}")
        trainer.kill()
        place.config(disk={"flush": {"every": 2}}, far={}, max_wait="5s")

    return die


def in_memory(place: Place) -> list[int]:
    found = place.cli("ls", "--json", code=-1).document["checkpoints"]
    return [c["step"] for c in found if c["copies"].get("host", {}).get("state") == "sealed"]


def test_what_a_killed_trainer_left_in_memory_counts_and_is_drained(
    place: Place, died: Callable[..., None]
) -> None:
    """It is copied in the order of the tier."""
    died(1, 2)
    far = {"flush": {"order": "newest_first"}}
    place.config(disk={"flush": {"every": 2}}, far=far, max_wait="5s")
    assert in_memory(place) == [1, 2]
    assert "owed" in place.cli("ls").out
    assert place.cli("latest").out == "2@1\n"
    document = place.json("drain")
    done = {(one["step"], one["tier"]) for one in document["done"]}
    assert done >= {(1, "far"), (2, "far")}
    assert (document["left"], document["memory_kept"]) == ([], False)
    assert (place.steps("disk"), place.steps("far")) == ([2], [1, 2])
    first, second = ((f / "commit.json").stat().st_mtime_ns for f in place.folders("far"))
    assert second < first
    assert in_memory(place) == []
    again = place.json("drain")
    assert (again["done"], again["left"]) == ([], [])
    assert "nothing is in host memory" in place.cli("drain").out
    report = place.restored()
    assert (report.attempt, report.step) == (1, 2), "a drain takes no attempt"


def test_a_drain_frees_no_image_whose_copy_on_a_tier_is_damaged(
    place: Place, train: Callable[..., Trainer]
) -> None:
    """No flush replaces a damaged copy: the command that does needs the image."""
    place.config()
    trainer = train()
    for step in (1, 2):
        trainer.tell(f"save {step}")
    trainer.kill()
    (victim,) = place.folders()[0].glob("*.safetensors")
    victim.write_bytes(victim.read_bytes()[:100])
    answer = place.cli("drain", code=1)
    assert f"tierfall verify --config {place.yaml} 1@1 --tier disk --repair" in answer.err
    assert in_memory(place) == [1, 2]
    assert "damaged" in place.cli("ls", code=1).out
    assert place.json("drain", code=1)["done"] == []
    place.cli("verify", "--repair")
    assert not place.json("drain")["memory_kept"]
    assert place.steps() == [1, 2]


@pytest.mark.parametrize("order", ["newest_first", "in_order"])
def test_with_a_deadline_the_newest_comes_first_and_what_is_left_stays_in_memory(
    place: Place, died: Callable[..., None], order: str
) -> None:
    """The next drain brings it, also to a tier that accepts copies in order, and has a newer one by now."""
    died(1, 2, 3, 4)
    fast = {"flush": {"order": order}}
    slow = {**fast, "bandwidth": "200kB/s"}
    place.config(disk={"flush": {"every": 100}}, far=slow, max_wait="5s")
    document = place.json("drain", "--deadline", "1200ms", code=1)
    there = [one["step"] for one in document["done"] if one["tier"] == "far"]
    assert there
    assert sorted(there) == list(range(min(there), 5)), "the newest came before what was older"
    assert min(there) > 1
    left = {one["step"] for one in document["left"] if one["tier"] == "far"}
    assert left == set(range(1, min(there)))
    assert document["memory_kept"]
    assert document["forecast"]
    assert in_memory(place)
    place.config(disk={"flush": {"every": 100}}, far=fast, max_wait="5s")
    place.cli("drain")
    assert place.steps("far") == [1, 2, 3, 4]
    for wrong in ("soon", "10x", ""):
        assert "--deadline" in place.cli("drain", "--deadline", wrong, code=2).err


def test_a_drain_makes_room_on_a_full_tier(place: Place, train: Callable[..., Trainer]) -> None:
    full = {"capacity": "400KiB"}
    place.config(disk=full)
    place.save(1, 2)
    place.config(disk={**full, **SLOW})
    trainer = train()
    trainer.tell("capture 3")
    trainer.kill()
    place.config(disk=full)
    document = place.json("drain")
    assert [one["step"] for one in document["done"]] == [3]
    assert place.steps()[-1] == 3
    assert len(place.steps()) >= 2, "no more goes than it needs"
    place.cli("verify")


def test_a_drain_that_was_killed_goes_on_where_it_stopped(
    place: Place, died: Callable[..., None]
) -> None:
    """The file that it had begun becomes that of the image: what is in it is not sent again."""
    died(1)
    place.config(disk={"flush": {"every": 2}}, far={"bandwidth": "20kB/s"}, max_wait="60s")
    killed = place.begin("drain")
    begun = place.root / "far" / "run"
    wait_until(lambda: bool([*begun.glob("step-*/.tierfall-*.part")]), "an image is begun")
    killed.kill()
    (left,) = begun.glob("step-*/.tierfall-*.part")
    number = left.stat().st_ino
    place.config(disk={"flush": {"every": 2}}, far={}, max_wait="5s")
    assert place.json("drain")["left"] == []
    (image,) = place.folders("far")[0].glob("*.safetensors")
    assert image.stat().st_ino == number
    assert [*begun.rglob("*.part")] == []
    place.cli("verify")


def test_a_start_waits_for_a_drain_of_what_the_one_before_left(
    place: Place, died: Callable[..., None], log: Log
) -> None:
    died(1)
    words = {"disk": {"flush": {"every": 2}}, "max_wait": "60s"}
    place.config(far={"bandwidth": "20kB/s"}, **words)
    drains = place.begin("drain")
    lock = next(place.memory.rglob("slot-0.lock"))
    wait_until(lambda: b"tierfall drain" in lock.read_bytes(), "it holds the run")
    place.config(far={}, **words)
    assert place.restored().step == 1
    assert log.lines("tierfall drain"), "it says what it waits for"
    assert drains.end().code == 0


def test_what_survived_two_deaths_is_drained(
    place: Place, died: Callable[..., None], train: Callable[..., Trainer]
) -> None:
    """The second trainer took a new attempt, adopted what it found, and died before it saved."""
    died(1)
    place.config(disk={"flush": {"every": 2}}, far=SLOW, max_wait="5s")
    again = train()
    assert again.restored == 1
    again.program.signal(signal.SIGKILL)  # nobody waits for it: it is a zombie until the end
    stat = Path(f"/proc/{again.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "it is a zombie")
    wait_until(lambda: len([*Path(f"/proc/{again.pid}/task").iterdir()]) == 1, "with one thread")
    place.config(disk={"flush": {"every": 2}}, far={}, max_wait="5s")
    assert place.json("drain")["left"] == []
    assert place.steps("far") == [1]


def test_a_start_that_was_closed_blocks_no_drain(place: Place) -> None:
    seldom = {"flush": {"every": 100}}
    place.config(disk=seldom)
    with place.open() as ckpt:
        ckpt.save(1, state_of(1)).captured()
    with place.open() as ckpt:
        ckpt.restore(blank())
    answer = place.cli("drain")
    assert "every: 1" in answer.out, "no tier is owed it, and the line says what would change that"
    assert in_memory(place) == [1]
    place.config(disk={})
    place.cli("drain")
    assert (place.steps(), in_memory(place)) == ([1], [])


def test_with_on_close_keep_memory_is_flushed_and_kept(place: Place) -> None:
    place.config(host={"on_close": "keep"}, disk={"flush": {"every": 100}})
    with place.open() as ckpt:
        ckpt.save(1, state_of(1)).captured()
    place.config(host={"on_close": "keep"}, disk={})
    document = place.json("drain")
    assert (document["memory_kept"], document["left"]) == (True, [])
    assert place.ls() == {"1@1": {"host": "sealed", "disk": "committed"}}


def test_discard_frees_memory_once_the_name_of_the_run_was_typed(
    place: Place, died: Callable[..., None]
) -> None:
    died(1, 3)
    for typed in ("", "y\n", " run\n"):
        answer = place.cli("drain", "--discard", input=typed, code=1)
        assert "1@1, 3@1" in answer.out + answer.err
        assert "nothing was freed" in answer.err
    assert in_memory(place) == [1, 3]
    place.cli("drain", "--discard", "--deadline", "5s", input="run\n", code=2)
    place.cli("drain", "--discard", input="run\n")
    assert in_memory(place) == []
    assert place.steps("far") == []


def test_all_drains_each_run_by_the_file_that_its_memory_notes(
    place: Place, died: Callable[..., None]
) -> None:
    died(1, 2)
    elsewhere = place.root / "elsewhere.yaml"
    elsewhere.write_text(
        f'{{"tiers": [{{"name": "host", "kind": "host", "folder": "{place.memory}"}}]}}'
    )
    shown = tierfall_command("runs", "--json", "--config", str(place.yaml)).document["memory"]
    (one,) = shown
    assert one["file"] == str(place.yaml)
    assert one["checkpoints"] == [{"step": step, "attempt": 1} for step in (1, 2)]
    answer = place.cli("drain", "--all")
    assert "flushed 2@1 to far" in answer.out
    assert (place.steps("far"), in_memory(place)) == ([1, 2], [])
    assert "--run" in place.cli("drain", "--all", "--run", "run", code=2).err


def test_nothing_is_drained_once_the_run_went_on_elsewhere_without_this_memory(
    place: Place, died: Callable[..., None]
) -> None:
    died(1)
    config = place.config(disk={"flush": {"every": 2}}, far={}, max_wait="5s")
    elsewhere = {**config["tiers"][0], "folder": str(place.root / "memory of another machine")}
    place.write({**config, "tiers": [elsewhere, *config["tiers"][1:]]})
    save(place, 3)
    place.write(config)
    before = {n: d for n, d in files_below(place.root).items() if n.startswith(("disk", "far"))}
    answer = place.cli("drain", code=1)
    assert "start the training here" in answer.err
    assert in_memory(place) == [1]
    after = {n: d for n, d in files_below(place.root).items() if n.startswith(("disk", "far"))}
    assert after == before


def test_a_tier_that_is_away_keeps_no_other_from_its_copy_and_memory_is_kept_for_it(
    place: Place, died: Callable[..., None]
) -> None:
    died(1, 2)
    shutil.move(place.root / "far", place.root / "unmounted")
    answer = place.cli("drain", code=1)
    assert "far" in answer.err
    assert not (place.root / "far").exists()
    assert place.steps("disk") == [2]
    assert in_memory(place) != []
    shutil.move(place.root / "unmounted", place.root / "far")
    place.cli("drain")
    assert place.steps("far") == [1, 2]


def test_what_a_tier_is_owed_from_another_tier_is_left_to_the_next_start(place: Place) -> None:
    place.config(disk={})
    save(place, 1)
    place.config(disk={}, far={})
    (place.root / "far").mkdir()
    document = place.json("drain", code=-1)
    assert [(one["step"], one["tier"]) for one in document["left"]] == [(1, "far")]
    assert list((place.root / "far").iterdir()) == []
    with place.open() as ckpt:
        ckpt.restore(blank())
        ckpt.drain()
    assert place.steps("far") == [1]


# Hooks of a scheduler -------------------------------------------------------------------------------------


COMMAND = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    asked.sendall(json.dumps([sys.argv[1:], dict(os.environ)]).encode())
    asked.shutdown(socket.SHUT_WR)
    code, out, err = json.load(asked.makefile())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
"""``tierfall`` for a shell: it has the command run where the tests run it, with torch imported already."""


@pytest.fixture
def command(place: Place) -> Iterator[Path]:
    """A file ``tierfall`` that a shell can run."""
    path = place.root / "bin" / "tierfall"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address := f"\0tierfall-{place.memory.name}")
        server.listen()
        path.write_text(COMMAND.format(python=sys.executable, address=address))
        path.chmod(0o755)
        thread = threading.Thread(target=_run_commands, args=[server])
        thread.start()
        yield path
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def _run_commands(server: socket.socket) -> None:
    while True:
        try:
            asking, _ = server.accept()
        except OSError:
            return
        with asking, asking.makefile() as words:
            arguments, environment = json.load(words)
            done = tierfall_command(*arguments, **environment)
            asking.sendall(json.dumps([done.code, done.out, done.err]).encode())


def hook(
    place: Place, command: Path, script: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "TIERFALL": str(command),
        "TIERFALL_CONFIG": str(place.yaml),
        "SLURM_JOB_USER": "root" if os.geteuid() == 0 else os.environ.get("USER", ""),
        **environment,
    }
    words = ["/bin/sh", str(ROOT / "examples" / script)]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=False, env=environment
    )


def test_the_slurm_epilog_drains_and_never_takes_a_node_out_of_service(
    place: Place, died: Callable[..., None], command: Path
) -> None:
    died(1)
    done = hook(place, command, "slurm_epilog.sh")
    assert (done.returncode, place.steps("far")) == (0, [1]), done.stderr
    assert in_memory(place) == []
    place.yaml.write_text("run: [")
    broken = hook(place, command, "slurm_epilog.sh")
    assert broken.returncode == 0
    assert broken.stderr
    place.yaml.unlink()
    assert hook(place, command, "slurm_epilog.sh").returncode == 0


def test_the_prestop_hook_ends_the_trainer_and_drains_what_it_left(
    place: Place, train: Callable[..., Trainer], command: Path
) -> None:
    place.config(far=SLOW, max_wait="5s")
    trainer = train()
    trainer.tell("capture 1")
    place.config(far={}, max_wait="5s")
    done = hook(place, command, "kubernetes_prestop.sh", TIERFALL_NOTICE="50")
    assert done.returncode == 0, done.stderr
    wait_until(trainer.program.ended, "the trainer has ended")
    assert place.steps("far") == [1]
    assert folder_of(place, 1, "far").exists()


def far_alone(place: Place) -> None:
    """Step 1 is on the tier that all nodes see; this node is new."""
    place.config(nvme={"shared": False}, far={"shared": True})
    place.save(1)
    shutil.rmtree(place.root / "nvme")
    shutil.rmtree(place.memory)
    place.memory.mkdir()


def test_the_slurm_prolog_brings_this_nodes_part_and_never_takes_a_node_out_of_service(
    place: Place, command: Path
) -> None:
    far_alone(place)
    scontrol = place.root / "scontrol"
    scontrol.write_text("#!/bin/sh\necho n1; echo n10; echo n12")
    scontrol.chmod(0o755)
    job = {"SCONTROL": str(scontrol), "SLURM_JOB_NODELIST": "n[1,10,12]"}
    other = hook(place, command, "slurm_prolog.sh", SLURMD_NODENAME="n1", **job)
    assert (other.returncode, place.steps("nvme")) == (0, []), other.stderr
    assert "fewer ranks than nodes" in other.stdout, "the only rank is on the last node"
    done = hook(place, command, "slurm_prolog.sh", SLURMD_NODENAME="n12", **job)
    assert (done.returncode, place.steps("nvme")) == (0, [1]), done.stderr
    alone = hook(place, command, "slurm_prolog.sh")
    assert (alone.returncode, "1@1 is on" in alone.stdout) == (0, True), alone.stderr
    place.yaml.write_text("run: [")
    broken = hook(place, command, "slurm_prolog.sh")
    assert (broken.returncode, bool(broken.stderr)) == (0, True)
    place.yaml.unlink()
    assert hook(place, command, "slurm_prolog.sh").returncode == 0


def test_the_init_container_brings_what_the_pod_restores(place: Place, command: Path) -> None:
    far_alone(place)
    job = yaml.safe_load((ROOT / "examples" / "kubernetes_prefetch.yaml").read_text())["spec"]
    pod = job["template"]["spec"]
    (init,) = pod["initContainers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in init["volumeMounts"]} <= volumes
    assert f"/{job['completions']}" in init["command"][-1]
    environment = {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "JOB_COMPLETION_INDEX": str(job["completions"] - 1),
        init["env"][0]["name"]: str(place.yaml),
    }
    for _ in range(2):
        subprocess.run(init["command"], check=True, timeout=60, env=environment)
        assert place.steps("nvme") == [1]
    place.yaml.unlink()
    subprocess.run(init["command"], check=True, timeout=60, env=environment)
