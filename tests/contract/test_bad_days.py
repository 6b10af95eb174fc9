"""Bad days: kills, full disks, damage, tiers that are away or lie, second starts, signals, odd clocks.

Whatever happens, a step that was reported committed comes back bit for bit or the restore raises; nothing that could
not be looked at is taken for absent or damaged; and the training goes on.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.contract.faulty import Faulty
from tests.contract.kit import (
    IMAGE,
    MANIFEST,
    Place,
    blank,
    files_below,
    flip,
    restored,
    save_steps,
    state_of,
    step_in,
    wait_until,
)
from tests.contract.trainer import Trainer, trainers
from tierfall.errors import ConfigError, FencedError, LockError, RestoreError, TierfallError

SOON_S = 20.0
FILES = (IMAGE, MANIFEST, "commit.json")


@pytest.fixture
def trainer(place: Place) -> Iterator[Callable[..., Trainer]]:
    """A living trainer of the run in another process."""
    with trainers(place) as start:
        yield start


# Kills -----------------------------------------------------------------------------------------------


def test_a_kill_at_any_moment_loses_nothing_that_was_reported(place: Place) -> None:
    """Nor does it leave anything: the next start collects what was unfinished. Three lives, one after the other."""
    place.config(
        host={"capacity": "1MiB"}, disk={"retain": {"last": 3}}, pfs={"flush": {"every": 2}}
    )
    code = """
    with tierfall.open("tiers.yaml") as ckpt:
        state = blank()
        report = ckpt.restore(state)
        first = report.step if report else 0
        assert step_in(state) == (first if report else -1)
        print("restored", first)
        for step in range(first + 1, first + 100):
            handle = ckpt.save(step, state_of(step))
            if step % 3 == 0:
                handle.wait("disk")
                print("reported", step)
    """
    reported = 0
    for life, pause_s in enumerate((0.0, 0.017, 0.037)):
        program = place.start(code)
        assert int(program.line().split()[1]) >= reported
        for _ in range(1 + life):
            reported = int(program.line().split()[1])
        time.sleep(pause_s)
        program.kill()
    assert place.restored().step >= reported
    place.cli("drain")
    for tier in ("disk", "pfs"):
        names = {p.name for p in (place.root / tier / "run").glob("step-*/*")}
        assert not {n for n in names if n.startswith(".")}
        for folder in (place.root / tier / "run").glob("step-*"):
            assert (folder / "commit.json").exists(), folder
        assert place.steps(tier)
    assert place.json("verify")["ok"]


@pytest.mark.parametrize("key", [IMAGE, MANIFEST, "commit.json", "latest"])
def test_a_kill_in_the_middle_of_each_file_of_a_commit(
    place: Place, store: Faulty, trainer: Callable[..., Trainer], key: str
) -> None:
    """Memory has the step, and the next start brings it to the tier."""
    place.config(store=store.tier(), disk={})
    place.save(1)
    living = trainer()
    store.set("hang", "latest" if key == "latest" else f"step-00000002-a0002/{key}", call="put")
    living.tell("capture 2")
    wait_until(lambda: store.struck("hang"), "the copy is at that file")
    living.kill()
    store.heal()
    assert (2 in store.steps()) == (key == "latest")
    assert place.restored().step == 2
    assert store.steps() == [1, 2]
    assert place.json("verify")["ok"]


def test_a_kill_while_a_checkpoint_is_deleted_leaves_it_whole_or_gone(
    place: Place, store: Faulty, trainer: Callable[..., Trainer]
) -> None:
    place.config(store=store.tier(retain={"last": 1}))
    place.save(1)
    store.set("hang", f"step-00000001-a0001/{IMAGE}", call="delete")
    living = trainer()
    living.tell("capture 2")
    wait_until(lambda: store.struck("hang"), "it is being deleted")
    assert store.steps() == [2], "the commit record goes first"
    living.kill()
    store.heal()
    assert place.restored().step == 2
    assert store.steps() == [2]
    wait_until(lambda: not (store.folder / f"run/step-00000001-a0001/{IMAGE}").exists(), "gone")


def test_a_program_that_ends_without_closing_loses_nothing(place: Place) -> None:
    for number, (end, code) in enumerate(
        {"": 0, "sys.exit(3)": 3, "raise ArithmeticError": 1}.items()
    ):
        place.config(run=f"ends-{number}")
        answer = place.run(
            f"""
            ckpt = tierfall.open("tiers.yaml")
            ckpt.save(1, state_of(1))
            {end}
            """
        )
        assert answer.code == code, answer.err
        assert "close" in answer.err
        assert place.restored().step == 1
    assert not [p for p in place.memory.rglob("*") if p.stat().st_size > 100_000]


# Damage ----------------------------------------------------------------------------------------------


def change(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def test_damage_of_one_copy_is_read_around_and_mended_by_a_command(place: Place) -> None:
    """Each file of a checkpoint, harmed in each way: a step for each."""
    harms = [(harm, file) for harm in (change, cut, lengthen, empty, remove) for file in FILES]
    harms.remove((remove, "commit.json"))  # that is no checkpoint
    place.config(host={"capacity": "200KiB"}, disk={}, pfs={})
    place.save(*range(1, len(harms) + 2))
    for (harm, file), folder in zip(harms, place.folders("disk"), strict=False):
        harm(folder / file)
    for step in range(1, len(harms) + 1):
        state = tierfall.load(place.yaml, step=step)
        assert step_in(state) == step
    found = place.json("verify", code=1)
    assert {(d["tier"], d["step"]) for d in found["damage"]} == {
        ("disk", step) for step in range(1, len(harms) + 1)
    }
    assert place.cli("ls", code=-1).out.count("damaged") == len(harms)
    place.json("verify", "--repair")
    assert place.json("verify")["ok"]
    assert place.steps("disk") == list(range(1, len(harms) + 2))


def test_any_flipped_bit_of_a_checkpoint_is_found(place: Place) -> None:
    """In the header, in padding, in tensors, in documents: by ``verify``, and no wrong value is ever returned."""
    place.config()
    place.save(1)
    folder = place.folders()[0]
    whole = files_below(folder)
    for name in FILES:
        size = len(whole[name])
        for at in {0, 9, size // 3, size // 2, size - 2}:
            flip(folder / name, at)
            with pytest.raises((RestoreError, TierfallError)):
                tierfall.load(folder)
            (folder / name).write_bytes(whole[name])
    flip(folder / IMAGE)
    found = place.json("verify", code=1)
    assert any(IMAGE in problem for problem in found["problems"])


def test_a_damaged_image_in_memory_is_read_from_a_tier(place: Place) -> None:
    place.config(host={"on_close": "keep"})
    place.save(1)
    found = [p for p in place.memory.rglob("*") if p.is_file() and p.stat().st_size > 100_000]
    assert found
    for path in found:
        data = bytearray(path.read_bytes())
        needle = torch.full((64,), 1.0).numpy().tobytes()
        at = data.find(needle)
        assert at > 0
        with path.open("r+b") as file:
            file.seek(at + 100)
            file.write(b"\x7f")
    report = place.restored()
    assert "disk" in {source.tier for source in report.sources}


def test_a_copy_that_a_load_finds_damaged_counts_for_nothing_from_then_on(place: Place) -> None:
    place.config(disk={"retain": {"last": 2}})
    with place.open() as ckpt:
        save_steps(ckpt, 1, 2)
    flip(place.folders()[1] / IMAGE)
    with place.open() as ckpt:
        assert restored(ckpt).step == 1
        ckpt.save(3, state_of(3), block=True)
        ckpt.save(4, state_of(4), block=True)
        ckpt.drain()
        assert 1 not in [
            c.step for c in ckpt.checkpoints() if any(copy.damage for copy in c.copies.values())
        ]
    assert place.ls().keys() >= {"3@2", "4@2"}
    assert {3, 4} <= {int(f.name[5:13]) for f in place.folders()}


# Could not look is never nothing there ---------------------------------------------------------------


@pytest.mark.parametrize("mount_point", [False, True])
def test_a_folder_that_is_not_mounted_is_not_a_run_without_checkpoints(
    place: Place, mount_point: bool
) -> None:
    """Neither as a missing folder nor as the empty one of a mount point."""
    place.config(disk={"shared": True})
    place.save(1, 2)
    away = (place.root / "disk").rename(place.root / "away")
    if mount_point:
        (place.root / "disk").mkdir()
    for call in ("begin", "restore"):
        with pytest.raises(TierfallError, match="disk"), place.open() as ckpt:
            ckpt.begin() if call == "begin" else ckpt.restore(blank())
    assert place.cli("latest", code=1).out == ""
    assert "disk" in place.cli("ls", code=1).err
    shutil.rmtree(place.root / "disk", ignore_errors=True)
    away.rename(place.root / "disk")
    assert place.restored().step == 2
    assert place.steps() == [1, 2]


def test_a_start_without_a_tier_that_may_have_something_newer_must_be_asked_for(
    place: Place,
) -> None:
    place.config(disk={}, pfs={"shared": True})
    place.save(1, 2)
    shutil.rmtree(place.folders("disk")[1])
    (place.root / "disk/run/latest").write_text("step-00000001-a0001\n")
    away = (place.root / "pfs").rename(place.root / "away")
    with pytest.raises(RestoreError, match=r"(?s)pfs.*unreachable"):
        place.restored()
    with place.open() as ckpt:
        assert restored(ckpt, unreachable="ignore").step == 1
        assert ckpt.save(2, state_of(20)).attempt > 1000
        ckpt.drain(deadline=5)
    away.rename(place.root / "pfs")
    with place.open() as ckpt:
        state = blank()
        report = ckpt.restore(state)
        assert (report.step, step_in({**state, "extra": {"step": 20}})) == (2, 20)


@pytest.mark.parametrize(
    ("file", "fault"),
    [*((file, "deny") for file in FILES), (IMAGE, "away")],  # each try of the latter takes seconds
)
def test_what_may_not_be_read_is_neither_passed_over_nor_deleted(
    place: Place, store: Faulty, file: str, fault: str
) -> None:
    place.config(store=store.tier())
    place.save(1, 2)
    place.config(store=store.tier(retain={"last": 1}))
    store.set(fault, f"step-00000002-a0001/{file}")
    with place.open() as ckpt:
        with pytest.raises(RestoreError, match=r"(?s)2@1.*unreachable"):
            ckpt.restore(blank())
        report = restored(ckpt, unreachable="ignore")
        assert report.step == 1
        assert any("2@1" in f"{f.what} {f.id}" for f in report.fallbacks)
        save_steps(ckpt, 3, 4)
        wait_until(lambda: store.steps() == [2, 4], "the rules delete what could be read")
    store.heal()
    assert step_in(tierfall.load(place.yaml, step=2, attempt=1)) == 2


def test_a_file_without_the_right_to_read_it_is_not_damaged(place: Place) -> None:
    """EACCES in a folder: of the image, the manifest or the commit record."""
    for number, file in enumerate(FILES):
        place.config(disk={"path": str(place.root / str(number)), "retain": {"last": 2}})
        place.save(1, 2)
        hidden = place.root / f"{number}/run/step-00000002-a0001/{file}"
        hidden.chmod(0)
        answer = place.run(
            """
            with Modes(), tierfall.open("tiers.yaml") as ckpt:
                try:
                    ckpt.restore(blank())
                except tierfall.errors.RestoreError as error:
                    print("unreachable" in str(error), "2@1" in str(error))
                print(ckpt.restore(blank(), unreachable="ignore").step)
                save_steps(ckpt, 3, 4, 5)
                ckpt.drain()
            """
        )
        assert (answer.code, answer.out) == (0, "True True\n1\n"), (file, answer.err)
        hidden.chmod(0o644)
        assert step_in(tierfall.load(hidden.parent)) == 2


@pytest.mark.parametrize("thing", ["link", "folder", "fifo"])
@pytest.mark.parametrize("file", ["commit.json", IMAGE])
def test_a_link_or_a_folder_in_place_of_a_file_is_reported_and_hides_nothing(
    place: Place, file: str, thing: str
) -> None:
    place.config()
    place.save(1, 2)
    path = place.folders()[1] / file
    moved = path.rename(place.root / "moved")
    if thing == "link":
        path.symlink_to(moved)
    elif thing == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(RestoreError, match=r"(?s)2@1.*unreachable"):
        place.restored()
    assert place.restored(unreachable="ignore").step == 1
    assert moved.exists()
    assert "2@1" in place.cli("latest", code=1).err


@pytest.mark.parametrize("hidden", ["step-00000002", "step-", "run/", f"a0001/{IMAGE}", "commit"])
def test_what_a_lagging_listing_leaves_out_is_asked_for_by_name(
    place: Place, store: Faulty, hidden: str
) -> None:
    place.config(store=store.tier())
    place.save(1, 2)
    place.config(store=store.tier(retain={"last": 1}))
    store.set("hide", hidden)
    with place.open() as ckpt:
        assert restored(ckpt).step == 2
        ckpt.save(3, state_of(3), block=True)
        ckpt.drain(deadline=0.2)
        if hidden != f"a0001/{IMAGE}":
            assert {1, 2} <= set(store.steps()), "no rule deletes while the listing lags"
    store.heal()
    assert place.restored().step == 3


def test_what_a_listing_shows_and_the_store_calls_absent_could_not_be_read(
    place: Place, store: Faulty
) -> None:
    place.config(store=store.tier())
    place.save(1, 2)
    store.set("absent", f"step-00000002-a0001/{IMAGE}")
    with pytest.raises(RestoreError, match="2@1"):
        place.restored()
    store.heal()
    assert place.restored().step == 2


def test_step_folders_that_were_moved_away_are_missed_by_what_latest_names(place: Place) -> None:
    place.config()
    place.save(1, 2)
    moved = place.folders()[1].rename(place.root / "moved")
    with pytest.raises(RestoreError, match="2@1"):
        place.restored()
    assert place.restored(unreachable="ignore").step == 1
    moved.rename(place.root / "disk/run/step-00000002-a0001")
    assert place.restored().step == 2


# A tier that misbehaves ------------------------------------------------------------------------------


def test_a_store_that_hangs_holds_up_nothing_for_longer_than_max_wait(
    place: Place, store: Faulty
) -> None:
    """Neither save, nor close, nor the end of the program, nor the commands, nor the next start."""
    place.config(store=store.tier(), disk={}, max_wait="100ms")
    place.save(1)
    store.set("hang")
    program = place.start(
        """
        began = time.monotonic()
        with tierfall.open("tiers.yaml") as ckpt:
            print("open", time.monotonic() - began)
            ckpt.restore(blank(), unreachable="ignore")
            ckpt.save(2, state_of(2)).wait("disk")
        print("closed", time.monotonic() - began)
        """
    )
    answer = program.end(timeout_s=45)
    assert answer.code == 0, answer.err
    assert float(answer.out.split()[-1]) < 30
    assert "store" in answer.err
    store.heal()
    assert place.restored().step == 2
    assert store.steps() == [1, 2]


def test_a_store_that_loses_what_it_accepts_is_noticed_before_another_copy_goes(
    place: Place, store: Faulty
) -> None:
    place.config(store=store.tier(retain={"last": 1}))
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        store.set("lose", f"step-00000002-a0001/{IMAGE}")
        ckpt.save(2, state_of(2)).captured(timeout=SOON_S)
        wait_until(lambda: store.struck("lose"), "it is lost")
        ckpt.drain(deadline=0.5)
        assert step_in(tierfall.load(store.folder / "run/step-00000001-a0001")) == 1
        store.heal()
        ckpt.save(3, state_of(3), block=True)
    assert place.restored().step == 3


def test_a_folder_that_is_lost_in_mid_run_loses_nothing_and_close_says_where_it_is(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tierfall")
    place.config(disk={}, max_wait="1s")
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        shutil.rmtree(place.root / "disk")
        ckpt.save(2, state_of(2)).captured(timeout=SOON_S)
        wait_until(lambda: "2@1 to disk failed" in caplog.text, "it is reported with the cure")
    assert "memory of this machine alone" in caplog.text
    report = place.restored()
    assert report.step == 2
    assert {s.tier for s in report.sources} == {"host"}
    assert place.steps()[-1] == 2


# Second starts ---------------------------------------------------------------------------------------


def test_a_second_start_on_this_machine_is_refused_and_named(
    place: Place, trainer: Callable[..., Trainer]
) -> None:
    place.config()
    first = trainer()
    with pytest.raises(LockError, match=str(first.pid)):
        place.open()
    first.tell("save 1")
    assert step_in(tierfall.load(place.yaml)) == 1
    for command in (
        ("prune",),
        ("drain",),
        ("verify", "--repair"),
        ("rm", "--all", "--run", "run"),
    ):
        assert place.cli(*command, code=1, input="").err
    first.kill()
    assert place.restored().step == 1


def test_a_stopped_trainer_that_a_newer_start_has_followed_writes_nothing_when_it_wakes(
    place: Place, trainer: Any
) -> None:
    """As on another node: with other memory, and the same shared folder."""
    place.config(disk={"shared": True, "retain": {"last": 2}})
    old = trainer()
    for step in (1, 2):
        old.tell(f"save {step}")
    old.program.signal(signal.SIGSTOP)
    old.program.tell("save 3")
    place.memory = place.root / "memory of another node"
    place.config(disk={"shared": True, "retain": {"last": 2}})
    with place.open() as ckpt:
        assert restored(ckpt).step == 2
        ckpt.save(3, state_of(3), block=True)
        before = {f.name: files_below(f) for f in place.folders()}
        old.program.signal(signal.SIGCONT)
        assert old.read().startswith("FencedError")
        after = {f.name: files_below(f) for f in place.folders()}
        assert after.items() <= before.items(), "the newer start may delete, nobody writes"
        ckpt.save(4, state_of(4), block=True)
    found = [(f.name[5:13], f.name[-1]) for f in place.folders()]
    assert found[-1] == ("00000004", "2")
    assert place.restored().step == 4


def test_a_newer_start_fences_an_older_one_in_the_same_job(
    place: Place, trainer: Callable[..., Trainer]
) -> None:
    """The handle and the next save raise a FencedError, which names the newer attempt."""
    place.config(disk={"shared": True})
    place.save(1)
    with place.open() as ckpt:
        restored(ckpt)
        memory, place.memory = place.memory, place.root / "other"
        place.config(disk={"shared": True})
        other = trainer()
        handle = ckpt.save(2, state_of(2))
        with pytest.raises(FencedError, match="attempt 3"):
            handle.wait(timeout=SOON_S)
        assert 2 in other.tell("save 2")
        with pytest.raises(FencedError):
            ckpt.save(3, state_of(3))
        place.memory = memory


def test_a_start_that_was_followed_neither_deletes_nor_pins(
    place: Place, trainer: Callable[..., Trainer]
) -> None:
    place.config(disk={"shared": True})
    place.save(1, 2)
    with place.open() as ckpt:
        restored(ckpt)
        memory, place.memory = place.memory, place.root / "other"
        place.config(disk={"shared": True})
        other = trainer()
        for call, step in ((ckpt.pin, 2), (ckpt.delete, 1)):
            with pytest.raises(FencedError, match="attempt 3"):
                call(step)
        assert 3 in other.tell("save 3")
        assert place.steps() == [1, 2, 3]
        assert not any(c["pinned"] for c in place.json("ls")["checkpoints"])
    place.memory = memory
    place.config(disk={"shared": True})
    assert place.restored().step == 3
    assert place.steps() == [1, 2, 3], "nothing is deleted later either"


def test_of_two_starts_at_the_same_moment_each_has_a_number_of_its_own(
    place: Place, store: Faulty
) -> None:
    """The store holds up the record of one until the other has taken its number. It takes the next one, and counts as
    the newer start."""
    place.config(store=store.tier())
    place.save(1)
    (place.root / "way").symlink_to(store.folder)
    other = Place(place.root / "other", place.root / "other memory")
    other.root.mkdir()
    other.config(store=store.tier())
    store.set("hang", "attempts", call="put")
    late = other.start(
        """
        with tierfall.open("tiers.yaml") as ckpt:
            print(ckpt.restore(blank()).step)
            print(ckpt.save(3, state_of(3), block=True).attempt)
        """
    )
    wait_until(lambda: store.struck("hang"), "it has chosen its number")
    place.config(store=Faulty(place.root, "way").tier())
    with place.open() as ckpt:
        assert restored(ckpt).step == 1
        assert ckpt.save(2, state_of(2), block=True).attempt == 2
        store.heal()
        assert [late.line(), late.line()] == ["2", "3"], late.errors()
        assert late.end().code == 0
        with pytest.raises(TierfallError, match="attempt 3"):
            ckpt.save(4, state_of(4), block=True)
    found = sorted(p.parent.name for p in store.folder.glob("run/step-*/commit.json"))
    assert found[1:] == ["step-00000002-a0002", "step-00000003-a0003"]


def test_a_start_beside_a_dead_one_whose_process_number_is_used_again_goes_on(
    place: Place,
) -> None:
    """What it left in memory is flushed by ``drain``, which asks the lock and no process number."""
    place.config(disk={"bandwidth": "10kB/s"})
    program = place.start_with_a_step_in_memory()
    os.kill(program.pid, signal.SIGKILL)  # a zombie: nobody has waited for it
    place.config()
    threads = Path(f"/proc/{program.pid}/task")  # they hold its lock until the last has ended
    wait_until(
        lambda: (
            threads.with_name("stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            and len(list(threads.iterdir())) == 1
            if threads.exists()
            else True
        ),
        "it is dead",
    )
    place.cli("drain")
    assert place.steps() == [1]
    program.kill()


# Signals, forks, limits ------------------------------------------------------------------------------


def test_sigterm_drains_and_then_ends_the_process(place: Place) -> None:
    """Also in the middle of a step, and with the handler of the program."""
    place.config(disk={"bandwidth": "400kB/s"}, drain={"deadline": "20s"})
    program = place.start(
        """
        import signal
        signal.signal(signal.SIGTERM, lambda *_: (print("mine"), sys.exit(7)))
        with tierfall.open("tiers.yaml") as ckpt:
            ckpt.save(1, state_of(1)).captured()
            print("sealed")
            while True:
                pass
        """
    )
    assert program.line() == "sealed"
    program.signal(signal.SIGTERM)
    assert program.line() == "mine"
    answer = program.end()
    assert answer.code == 7, answer.err
    assert place.steps() == [1]


def test_sigterm_without_drain_ends_at_once_and_memory_keeps_the_step(place: Place) -> None:
    place.config(disk={"bandwidth": "10kB/s"})
    program = place.start_with_a_step_in_memory()
    program.signal(signal.SIGTERM)
    assert program.end().code == -signal.SIGTERM
    place.config()
    assert place.restored().step == 1


def test_ctrl_c_is_raised_where_the_loop_is_and_loses_no_step(place: Place) -> None:
    place.config()
    program = place.start(
        """
        try:
            with tierfall.open("tiers.yaml") as ckpt:
                ckpt.save(1, state_of(1))
                print("saved")
                while True:  # a signal that comes right before a sleep is noticed after it
                    time.sleep(0.1)
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    assert program.line() == "saved"
    program.signal(signal.SIGINT)
    assert program.line() == "interrupted"
    assert program.end().code == 0
    assert place.steps() == [1]


def test_memory_that_is_too_small_is_refused_with_what_is_needed_and_the_cure(
    place: Place, mount: Callable[[Path, str], None]
) -> None:
    """As the ``/dev/shm`` of a container."""
    mount(place.memory / "small", "4m")
    place.config(host={"folder": str(place.memory / "small"), "capacity": "64MiB"})
    with pytest.raises(TierfallError, match=r"(?s)64.*MiB.*(shm-size|capacity)"):
        place.save(1)


def test_after_a_cleaner_removed_the_files_of_memory_the_next_images_are_in_new_ones(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.config(disk={"flush": {"every": 10}})
    with place.open() as ckpt:
        ckpt.save(1, state_of(1)).captured(timeout=SOON_S)
        ckpt.save(2, state_of(2)).captured(timeout=SOON_S)
        gone = (place.memory / "run").rename(place.memory / "gone")
        shutil.rmtree(gone)
        ckpt.save(3, state_of(3)).captured(timeout=SOON_S)
        assert "removed" in caplog.text, "the next save notices it"
        assert any(place.memory.rglob("*.image")), "and has a new file"
        with pytest.raises(LockError):
            place_of_another(place)
        assert place.ls()["3@1"]["host"] == "sealed"
        said = [r for r in caplog.records if r.levelname == "WARNING" and "removed" in r.message]
        assert len(said) == 1
    assert place.restored().step == 3


def place_of_another(place: Place) -> None:
    """Open the run in another process of this machine."""
    answer = place.run(
        """
        try:
            tierfall.open("tiers.yaml")
        except tierfall.errors.LockError:
            sys.exit(5)
        """
    )
    if answer.code == 5:
        raise LockError("refused")


def test_a_run_of_another_user_in_the_memory_folder_is_refused(place: Place) -> None:
    place.config()
    (place.memory / "run").mkdir()
    (place.memory / "run").chmod(0o777)
    with pytest.raises(ConfigError, match=r"(?s)chmod|others"), place.open() as ckpt:
        ckpt.save(1, state_of(1))


@pytest.mark.parametrize("days", [3650, -10_000])
def test_a_clock_that_jumps_changes_neither_the_newest_nor_what_is_kept(
    place: Place, days: int
) -> None:
    """Each start has another time and another time zone."""
    place.config(disk={"retain": {"for": "1h", "last": 2}})
    for step, (shift, zone) in enumerate(
        ((0, "UTC"), (days * 86400, "Asia/Kolkata"), (-3600, "America/New_York")), 1
    ):
        answer = place.run(
            f"""
            now, now_ns = time.time, time.time_ns
            time.time = lambda: now() + {shift}
            time.time_ns = lambda: now_ns() + {shift} * 10**9
            time.tzset()
            with tierfall.open("tiers.yaml") as ckpt:
                state = blank()
                report = ckpt.restore(state)
                assert step_in(state) == (report.step if report else -1)
                ckpt.save({step}, state_of({step}), block=True)
                ckpt.drain()
                assert all(c.wall_time_s for c in ckpt.checkpoints())
                print(report.step if report else None)
            """,
            TZ=zone,
        )
        assert answer.code == 0, answer.err
        assert answer.out == f"{step - 1 or None}\n"
        assert place.steps()[-2:] == [step - 1, step][-min(step, 2) :]
    assert place.cli("latest").out == "3@3\n"


def test_few_descriptors_are_enough_or_named(place: Place) -> None:
    place.config(disk={}, a={}, b={}, c={})
    answer = place.run(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with tierfall.open("tiers.yaml") as ckpt:
            save_steps(ckpt, *range(1, 11))
            state = blank()
            assert ckpt.restore(state).step == step_in(state) == 10
        """
    )
    assert answer.code == 0, answer.err
    assert place.steps("c") == list(range(1, 11))


def test_a_process_leaves_no_descriptors_threads_or_memory_behind(place: Place) -> None:
    place.config(disk={}, pfs={"compress": {"codec": "zstd"}})

    def use() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    place.save(1)
    with place.open() as ckpt:
        restored(ckpt)
    before = use()
    for step in range(2, 7):
        with place.open() as ckpt:
            restored(ckpt)
            ckpt.save(step, state_of(step), block=True)
    after = use()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 2
    assert resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_damaged_record_of_an_attempt_hides_no_checkpoint(place: Place) -> None:
    place.config(host={"on_close": "keep"})
    place.save(1)
    record = place.root / "disk/run/attempts/a0001.json"
    whole = record.read_bytes()
    for content in (b"", whole.replace(b'"run":"run"', b'"run":"qqq"'), whole[:40]):
        record.write_bytes(content)
        assert place.restored().step == 1
    assert place.json("verify", code=-1)["problems"] or record.read_bytes() == whole
    with place.open() as ckpt:
        restored(ckpt)
        ckpt.save(2, state_of(2), block=True)
    assert place.steps() == [1, 2]


def test_copies_of_a_lineage_that_was_left_stay_left_when_its_successors_are_gone(
    place: Place,
) -> None:
    """A run went back; later rules deleted all that the newer attempt had saved of those steps."""
    place.config(disk={"retain": {"last": 2}})
    with place.open() as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
            ckpt.pin(step)
    with place.open() as ckpt:
        assert restored(ckpt, step=1).step == 1
        save_steps(ckpt, 2, 3, 4, 5, 6)
    with place.open() as ckpt:
        assert restored(ckpt).step == 6
        found = {(c.step, c.attempt): c.abandoned for c in ckpt.checkpoints()}
        assert found[3, 1]
        assert found[2, 1]
        assert not found[1, 1]
        with pytest.raises(TierfallError):
            ckpt.restore(blank(), step=3)


def test_a_checkpoint_of_another_life_is_neither_replaced_nor_taken_for_the_new_one(
    place: Place,
) -> None:
    """Its folder comes back under the name of a step that is saved now."""
    place.config(disk={}, pfs={}, max_wait="1s")
    place.save(1)
    folder = place.folders("pfs")[0]
    before = files_below(folder)
    shutil.move(folder, place.root / "before")
    for gone in (place.root / "disk", place.root / "pfs", *place.memory.iterdir()):
        shutil.rmtree(gone)
    with place.open() as ckpt:
        shutil.move(place.root / "before", folder)
        handle = ckpt.save(1, state_of(11))
        handle.wait("disk")
        assert ckpt.drain(deadline=1.0).left == ((1, 1, "pfs"),)
        assert not handle.done("pfs")
    assert files_below(folder) == before


def test_what_was_left_stays_left_where_a_tier_has_nothing_of_the_new_lineage(place: Place) -> None:
    """The tiers that have the new lineage are lost."""
    place.config(disk={}, pfs={"flush": {"every": 3}})
    place.save(1, 2, 3)
    with place.open() as ckpt:
        assert restored(ckpt, step=1).step == 1
        ckpt.pin(3)
        ckpt.save(2, state_of(2), block=True)
    assert [folder.name for folder in place.folders("pfs")] == ["step-00000003-a0001"]
    shutil.rmtree(place.root / "disk")
    place.config(pfs={})
    with place.open() as ckpt, pytest.raises(TierfallError, match=r"3@1.*abandoned"):
        ckpt.restore(blank())


def test_a_run_that_is_begun_anew_while_a_tier_is_away_stays_the_newer_one(place: Place) -> None:
    place.config(disk={}, pfs={"shared": True})
    place.save(100, 200)
    shutil.rmtree(place.root / "disk")
    away = (place.root / "pfs").rename(place.root / "away")
    with place.open(fresh=True) as ckpt:
        ckpt.save(10, state_of(10)).wait("disk", timeout=SOON_S)
    away.rename(place.root / "pfs")
    assert place.restored().step == 10
