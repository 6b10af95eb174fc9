"""Each kind of tier keeps what its settings say: host memory, folders, and places that an address names."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.contract.kit import (
    IMAGE,
    Place,
    blank,
    equal,
    files_below,
    folder_of,
    restored,
    save_steps,
    state_of,
    step_in,
    training_state,
    wait_until,
)
from tierfall.errors import CapacityError, ConfigError

SOON_S = 20.0
SLOW = {"bandwidth": "10kB/s"}
"""A tier that gets nothing within a test."""


def restored_from(place: Place, **how: Any) -> tuple[int, set[str]]:
    """Restore in a start of its own: the step that the state then has, and the tiers that were read."""
    report = place.restored(**how)
    return report.step, {source.tier for source in report.sources}


def memory_of(place: Place) -> list[Path]:
    return [p for p in place.memory.rglob("*") if p.is_file() and p.stat().st_blocks > 100]


# Host memory -----------------------------------------------------------------------------------------


def test_memory_outlives_a_killed_process_and_is_restored_from(place: Place) -> None:
    """The next start restores the step that no tier has, and brings it to the tier that is owed it."""
    place.config(disk=SLOW)
    program = place.start_with_a_step_in_memory()
    program.kill()
    assert place.ls() == {"1@1": {"host": "sealed"}}
    place.config(disk={})
    assert restored_from(place) == (1, {"host"})
    assert place.steps() == [1]


def test_a_clean_close_frees_memory_and_on_close_keep_keeps_it(place: Place) -> None:
    place.config()
    place.save(1)
    assert "host" not in place.ls()["1@1"]
    assert memory_of(place) == []
    assert restored_from(place) == (1, {"disk"})
    place.config(host={"on_close": "keep"})
    with place.open() as ckpt:
        ckpt.restore(blank())
        ckpt.save(2, state_of(2), block=True)
    (copies,) = (copies for id, copies in place.ls().items() if id.startswith("2@"))
    assert copies == {"host": "sealed", "disk": "committed"}
    assert restored_from(place) == (2, {"host"})


@pytest.fixture
def half_freed(place: Place) -> Place:
    """A run of four steps, of which disk has 2 and 4, was killed while its close freed memory: 1, 2 and 3 are left."""
    place.config(disk={"flush": {"every": 2}})
    killed = place.run(
        """
        unlink = os.unlink
        def unlink_and_die(path, **words):
            unlink(path, **words)
            if len([*Path(path).parent.glob("*.image")]) == 3:
                os.kill(os.getpid(), 9)
        with tierfall.open("tiers.yaml") as ckpt:
            save_steps(ckpt, 1, 2, 3, 4)
            os.unlink = unlink_and_die
        """
    )
    assert killed.code == -9, killed.err
    assert [step for step, copies in place.ls().items() if "host" in copies] == [
        "1@1",
        "2@1",
        "3@1",
    ]
    assert place.steps() == [2, 4]
    return place


def test_a_start_that_has_nothing_to_do_frees_what_a_killed_close_left(half_freed: Place) -> None:
    """Step 3 was flushed nowhere, and need not be: step 4 is newer, and on a tier."""
    assert half_freed.restored().step == 4
    assert memory_of(half_freed) == []


def test_drain_frees_what_a_killed_close_left(half_freed: Place) -> None:
    answer = half_freed.cli("drain")
    assert "host memory is freed" in answer.out
    assert memory_of(half_freed) == []


@pytest.mark.parametrize("by", ["a close", "drain"])
def test_what_a_killed_close_left_stays_if_it_is_pinned_and_nowhere_else(
    half_freed: Place, by: str
) -> None:
    half_freed.cli("pin", "3")
    if by == "drain":
        answer = half_freed.cli("drain")
        assert re.search("owed what is in memory.*every: 1.*drain .*--discard", answer.out)
    else:
        half_freed.restored()
    assert half_freed.ls()["3@1"] == {"host": "sealed"}


def test_what_a_killed_close_left_stays_if_the_newest_step_is_not_whole_on_disk_any_more(
    half_freed: Place,
) -> None:
    with half_freed.open() as ckpt:
        restored(ckpt)
        (folder_of(half_freed, 4) / IMAGE).unlink()
    assert restored_from(half_freed) == (3, {"host"})
    half_freed.cli("drain")
    assert half_freed.ls()["3@1"] == {"host": "sealed"}, "now it is the newest"


@pytest.mark.parametrize("by", ["a close", "drain"])
def test_memory_stays_if_it_alone_has_the_newest_step_without_nan(place: Place, by: str) -> None:
    """A restart passes over step 2, which is on disk, and takes step 1."""
    place.config(disk={"flush": {"every": 2}}, host={"on_close": "keep"})
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), metrics={"loss": 1.0}, block=True)
        ckpt.save(2, state_of(2), metrics={"loss": float("nan")}, block=True)
    place.config(disk={"flush": {"every": 2}})
    if by == "drain":
        place.cli("drain")
    else:
        place.open().close()
    assert restored_from(place) == (1, {"host"})


def test_memory_is_in_the_folder_that_is_named_and_no_larger_than_its_capacity(
    place: Place,
) -> None:
    place.config(host={"capacity": "1MiB"}, disk=SLOW, max_wait="200ms")
    with place.open() as ckpt:
        handles = [ckpt.save(step, state_of(step)) for step in range(1, 16)]
        assert [h.outcome for h in handles].count("skipped") >= 8, "six images fit"
        assert sum(p.stat().st_blocks * 512 for p in memory_of(place)) > 500_000
        assert ckpt.statistics().capacity_bytes["host"] == 1 << 20
    assert "capacity" in str(handles[-1].exception())


def test_an_image_that_memory_has_no_room_for_is_refused_with_what_is_needed(place: Place) -> None:
    place.config(host={"capacity": "64KiB"})
    with place.open() as ckpt, pytest.raises(CapacityError, match=r"(?s)host.*KiB.*capacity"):
        ckpt.save(1, state_of(1))


def test_without_a_capacity_memory_is_made_for_two_images(place: Place) -> None:
    config = place.config()
    del config["tiers"][0]["capacity"]
    place.write(config)
    with place.open() as ckpt:
        ckpt.save(1, state_of(1, elements=1_000_000), block=True)
        assert 8_000_000 < (ckpt.statistics().capacity_bytes["host"] or 0) < 12_000_000


# A chain ---------------------------------------------------------------------------------------------


def test_every_tier_of_a_chain_restores_alone(place: Place) -> None:
    state = training_state()
    place.config(host={"capacity": "16MiB"}, a={}, b={"shared": True}, c={})
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        for tier in ("host", "a", "b", "c"):
            other = training_state(7)
            report = ckpt.restore(other, tier=tier)
            assert report is not None
            assert {source.tier for source in report.sources} == {tier}
            assert equal(other["model"].state_dict(), state["model"].state_dict())
            assert equal(other["optimizer"].state_dict(), state["optimizer"].state_dict())
    for tier in ("a", "b", "c"):
        alone = tierfall.load(place.root / tier)
        assert equal(dict(alone["model"]), dict(state["model"].state_dict()))


def test_several_runs_share_tiers_and_leave_each_other_alone(place: Place) -> None:
    place.config(disk={"retain": {"last": 1}})
    place.save(1)
    before = files_below(place.root / "disk" / "run")
    with place.open(run="other") as ckpt:
        assert ckpt.restore(blank()) is None
        save_steps(ckpt, 1, 2, 3)
    assert files_below(place.root / "disk" / "run") == before
    assert {r["run"] for r in place.json("runs")["runs"]} == {"run", "other"}


def test_a_device_tier_is_left_out_of_a_state_that_is_on_no_gpu(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    config = place.config()
    config["tiers"].insert(0, {"name": "device", "kind": "device", "capacity": "1MiB"})
    place.write(config)
    caplog.set_level("INFO", "tierfall")
    place.save(1)
    wait_until(lambda: "device" in caplog.text, "a line says so")
    assert place.ls() == {"1@1": {"disk": "committed"}}


# Capacity and rates ----------------------------------------------------------------------------------


def test_a_tier_never_holds_more_than_its_capacity(place: Place) -> None:
    place.config(disk={"capacity": "450KiB"}, pfs={})
    with place.open() as ckpt:
        for step in range(1, 9):
            ckpt.save(step, state_of(step), block=True)
            held = sum(len(c) for c in files_below(place.root / "disk" / "run").values())
            assert held <= 450 * 1024
    assert place.steps("pfs") == list(range(1, 9))
    assert place.steps("disk")[-1] == 8
    assert 1 < len(place.steps("disk")) < 5


def test_an_image_above_a_tiers_capacity_is_an_error_at_first_and_left_out_later(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The other tiers get what has outgrown one of them, and training goes on."""
    place.config(small={"capacity": "200KiB"}, disk={})
    with place.open() as ckpt:
        with pytest.raises(CapacityError, match=r"(?s)small.*200(\.0)? KiB"):
            ckpt.save(1, state_of(1, elements=200_000))
        ckpt.save(2, state_of(2), block=True)
        handle = ckpt.save(3, state_of(3, elements=200_000))
        handle.wait("disk", timeout=SOON_S)
        with pytest.raises((CapacityError, ValueError)):
            handle.wait("small", timeout=SOON_S)
        wait_until(lambda: "small" in caplog.text, "it is logged")
        ckpt.save(4, state_of(4), block=True)
    assert place.steps("disk") == [2, 3, 4]
    assert 3 not in place.steps("small")
    assert place.steps("small")[-1] == 4


def test_bandwidth_limits_what_is_written_and_read_bandwidth_what_is_read(place: Place) -> None:
    """An image of 80 KiB (and a header of 64 KiB) at 400 kB/s."""
    place.config(disk={"bandwidth": "400kB/s", "read_bandwidth": "400kB/s"})
    with place.open() as ckpt:
        began = time.monotonic()
        ckpt.save(1, state_of(1), block=True)
        ckpt.save(2, state_of(2), block=True)
        assert time.monotonic() - began > 0.35
    began = time.monotonic()
    assert step_in(tierfall.load(place.yaml)) == 2
    assert time.monotonic() - began > 0.1
    place.config(disk={"bandwidth": "50%"})
    place.run("tierfall.open('tiers.yaml').restore(blank())")
    assert restored_from(place) == (2, {"disk"})


# Compression -----------------------------------------------------------------------------------------


def test_a_tier_that_packs_is_smaller_and_gives_back_the_same_bytes(place: Place) -> None:
    codecs = {"z": "zstd", "p": "planes", "n": "none"}
    place.config(**{name: {"compress": {"codec": codec}} for name, codec in codecs.items()})
    state = {"w": torch.arange(100_000) % 1000, "extra": {"step": 1}}
    with place.open() as ckpt:
        ckpt.save(1, state, block=True)
        assert set(ckpt.statistics().compression) >= {"z", "p"}
        packed = ckpt.statistics().compression["z"]
        assert packed.stored_bytes < packed.raw_bytes
    sizes = {
        name: sum(p.stat().st_size for p in place.folders(name)[0].glob("*.safetensors*"))
        for name in codecs
    }
    assert sizes["z"] < sizes["n"] / 2
    assert sizes["p"] < sizes["n"] / 2
    for name in codecs:
        assert equal(tierfall.load(place.root / name)["w"], state["w"])


def test_codec_and_level_may_change_from_start_to_start(place: Place) -> None:
    for step, compress in enumerate(
        ({"codec": "zstd"}, {"codec": "none"}, {"codec": "zstd", "level": 9}, {"codec": "planes"})
    ):
        place.config(disk={"compress": compress})
        with place.open() as ckpt:
            ckpt.restore(blank())
            ckpt.save(step, state_of(step), block=True)
    assert place.steps() == [0, 1, 2, 3]
    assert place.json("verify")["ok"]


# Read-only -------------------------------------------------------------------------------------------


def test_a_read_only_tier_is_restored_from_and_never_changed(place: Place) -> None:
    place.config(old={}, disk={})
    place.save(1, 2)
    before = files_below(place.root / "old")
    place.config(disk={"retain": {"last": 1}}, old={"read_only": True})
    with place.open() as ckpt:
        for tier in (None, "old"):
            assert restored(ckpt, tier=tier).step == 2
        for step in (3, 4):
            assert ckpt.save(step, state_of(step), block=True).tiers == ("disk",)
        ckpt.drain()
    assert files_below(place.root / "old") == before
    assert place.steps("disk") == [4]


def test_a_read_only_tier_accepts_no_rule_of_writing(place: Place) -> None:
    rules: dict[str, Any] = {
        "flush": {"every": 2},
        "retain": {"last": 2},
        "evict": {"order": "oldest"},
        "compress": {"codec": "zstd"},
        "capacity": "1GiB",
        "bandwidth": "1MB/s",
        "when_full": "skip",
    }
    for key, value in rules.items():
        place.config(disk={}, old={"read_only": True, key: value})
        with pytest.raises(ConfigError, match=rf"tiers\.yaml:1: tiers\[2\].*read_only.*{key}"):
            place.open()


def test_a_tier_that_refuses_writes_counts_as_read_only_if_it_has_something_of_the_run(
    place: Place,
) -> None:
    place.config(disk={}, old={})
    place.save(1)
    for folder in (place.root / "old", *(p for p in (place.root / "old").rglob("*") if p.is_dir())):
        folder.chmod(0o555)
    answer = place.run(
        """
        with Modes(), tierfall.open("tiers.yaml") as ckpt:
            ckpt.restore(blank())
            ckpt.save(2, state_of(2), block=True)
        """
    )
    assert answer.code == 0, answer.err
    assert re.search("old.*read", answer.err)
    assert place.steps("disk") == [1, 2]
    assert place.steps("old") == [1]


def test_a_chain_that_cannot_be_written_to_is_refused(place: Place) -> None:
    """If a tier holds nothing of the run; and if no tier can be written to: that error names tierfall.load."""
    place.config()
    (place.root / "disk").mkdir(mode=0o555)
    code = """
    try:
        with Modes():
            tierfall.open("tiers.yaml")
    except (tierfall.errors.BackendError, tierfall.errors.ConfigError) as error:
        print(error)
    """
    assert "disk" in place.run(code).out
    (place.root / "disk").chmod(0o755)
    place.save(1)
    (place.root / "disk/run/attempts").chmod(0o555)
    place.config(disk={"read_only": True})
    with pytest.raises(ConfigError, match=r"tierfall\.load"):
        place.open()
    assert step_in(tierfall.load(place.yaml)) == 1


# Where tiers may be ----------------------------------------------------------------------------------


def test_no_two_tiers_share_a_folder_by_whatever_names(place: Place) -> None:
    (place.root / "real").mkdir()
    (place.root / "link").symlink_to("real")
    for a, b in (
        ("real", "real"),
        ("real", "link"),
        ("real", "real/inside"),
        ("x/../real", "real"),
    ):
        place.config(a={"path": str(place.root / a)}, b={"path": str(place.root / b)})
        with pytest.raises(ConfigError, match=r"tiers\[[12]\]\.path: .*tiers\[[12]\]"):
            place.open()
    assert list((place.root / "real").iterdir()) == []


@pytest.mark.parametrize("name", ["a b", "ü%20#?", 'it\'s "quoted"', "-x"])
def test_a_folder_may_have_any_name(place: Place, name: str) -> None:
    place.config(disk={"path": str(place.root / name)})
    place.save(1)
    assert restored_from(place) == (1, {"disk"})
    assert place.json("verify", "1")["ok"]


def test_a_tiers_folder_may_be_a_link_and_moves_with_the_file(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path starts at the folder of the YAML file, wherever the program is started."""
    (place.root / "project" / "far").mkdir(parents=True)
    place.yaml = place.root / "project" / "tiers.yaml"
    (place.root / "project" / "disk").symlink_to("far")
    place.config(disk={"path": "./disk"})
    monkeypatch.chdir("/")
    place.save(1)
    assert (place.root / "project/far/run/latest").exists()
    assert restored_from(place) == (1, {"disk"})


# Places by an address --------------------------------------------------------------------------------


def test_a_file_address_is_a_tier_like_a_folder(place: Place) -> None:
    url = f"file://{place.root}/store"
    place.config(store={"kind": "object", "url": url, "retain": {"last": 2}})
    place.save(1, 2, 3)
    assert place.steps("store") == [2, 3]
    place.config(disk={"path": str(place.root / "store")})
    assert restored_from(place) == (3, {"disk"})


def test_a_tier_of_an_fsspec_protocol_keeps_retains_and_restores(place: Place) -> None:
    place.config(
        host={"folder": str(place.memory)},
        store={"kind": "object", "url": "memory://bucket/x", "retain": {"last": 2}},
        other={"kind": "object", "url": "memory://bucket/y", "compress": {"codec": "zstd"}},
    )
    place.save(1, 2, 3)
    with place.open() as ckpt:
        for tier in ("store", "other"):
            assert restored(ckpt, tier=tier).step == 3
        assert [sorted(c.copies) for c in ckpt.checkpoints()] == [
            ["other"],
            ["other", "store"],
            ["other", "store"],
        ]
        ckpt.delete(2)
        assert [c.step for c in ckpt.checkpoints()] == [1, 3]
    assert step_in(tierfall.load(place.yaml, step=1)) == 1


def test_an_address_alone_and_a_folder_alone_are_a_whole_chain(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory is named ``host``; the tier ``disk`` for a folder and ``store`` for an address."""
    monkeypatch.setenv("TMPDIR", str(place.memory))
    for where, name in (("./alone", "disk"), ((place.root / "address").as_uri(), "store")):
        place.yaml.write_text(json.dumps({"run": f"contract-{os.getpid()}", "tiers": where}))
        with place.open() as ckpt:
            assert ckpt.save(1, state_of(1), block=True).tiers == (name,)
            assert set(ckpt.checkpoints()[0].copies) == {"host", name}


def test_an_address_that_is_none_is_refused_with_what_to_write(place: Place) -> None:
    for url, wanted in (
        ("s3://", "bucket"),
        ("b/c", "url"),
        ("s3a://bucket/x", "s3://"),
        ("nosuchprotocol://x/y", "nosuchprotocol"),
        ("http://127.0.0.1:9/x", "s3://BUCKET/PREFIX with options: {endpoint_url"),
        ("s3://key:secret@bucket/x", "options"),
    ):
        place.config(store={"kind": "object", "url": url})
        with pytest.raises(ConfigError, match=wanted) as raised:
            place.open()
        assert "store" in str(raised.value) or "tiers[1]" in str(raised.value)
        assert "secret@" not in str(raised.value)
