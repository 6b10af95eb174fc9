"""``check``: every tier is opened and measured, its guarantees are printed, and no file of it remains."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli

import tierfall
from tests.object_store import KEY, SECRET, SeaweedFS
from tests.steps import files_below, state_of
from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.open import open_backend
from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import load_config
from tierfall.core.types.backend import Traits
from tierfall.core.types.errors import StorageFullError, UnreachableError
from tierfall.ops import measure
from tierfall.tiers.listing import TierCatalog

MakeCli = Callable[..., Cli]
SMALL = ("--size", "300KiB")


def tier(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in document["tiers"] if one["name"] == name)


@pytest.fixture
def cli(make_cli: MakeCli, tmp_path: Path) -> Cli:
    """Two folders, as an earlier start left them."""
    cli = make_cli(disk={}, far={"shared": True, "capacity": "1GiB"})
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    return cli


def test_what_a_tier_promises_is_reported_in_words(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = cli("check", *SMALL).out
    assert "disk: durable, fenced, " in text
    assert "\n3 of 3 tiers answered; each rate was measured with 300 KiB\n" in text
    real = PosixBackend.traits.fget
    assert real is not None

    def weak(self: PosixBackend) -> Traits:
        weaker = {"durable": False, "conditional_create": False, "direct_io": False}
        return replace(real(self), **weaker)

    monkeypatch.setattr(PosixBackend, "traits", property(weak))
    text = cli("check", *SMALL).out
    assert "disk: NOT durable" in text
    assert "NOT fenced: an older start that is still alive may commit there" in text
    assert "no direct I/O, so reads may come from the page cache" in text


def test_real_bytes_go_through_the_backend_under_a_name_beside_the_runs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, int]] = []
    read: list[tuple[int, int]] = []
    real_create, real_read = PosixBackend.create, PosixBackend.read_into

    def create(self: Any, key: str, *, length: int, **words: Any) -> Any:
        written.append((key, length))
        return real_create(self, key, length=length, **words)

    def read_into(self: Any, key: str, offset: int, view: memoryview) -> None:
        if "probe" in key:
            read.append((offset, len(view)))
        real_read(self, key, offset, view)

    monkeypatch.setattr(PosixBackend, "create", create)
    monkeypatch.setattr(PosixBackend, "read_into", read_into)
    cli("check", *SMALL)
    assert len(written) == 2
    for key, length in written:
        assert key.startswith("tierfall-check-")
        assert length == 300 << 10
    assert sum(count for _, count in read) == 2 * (300 << 10)
    assert len(read) == 2 * 5, "in chunks of the configuration, 64 KiB"


def test_a_tier_that_is_not_there_is_reported_and_not_made(cli: Cli, tmp_path: Path) -> None:
    shutil.move(tmp_path / "disk", tmp_path / "unmounted")
    document = cli.json("check", *SMALL, code=1)
    (problem,) = document["problems"]
    assert "tier disk: " in problem
    assert "mount or restore it" in problem
    assert tier(document, "disk")["write_bytes_per_s"] is None
    assert tier(document, "far")["write_bytes_per_s"] > 0
    assert not (tmp_path / "disk").exists()
    assert "2 of 3 tiers answered" in cli("check", *SMALL, code=1).out


def test_a_folder_that_refuses_and_a_file_in_its_place_are_reported(
    cli: Cli, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").write_text("")
    answer = cli("check", *SMALL, code=1)
    assert "tier disk: " in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("when", ["write", "publish", "stat", "read_into"])
def test_a_tier_that_fails_on_the_way_keeps_nothing(
    cli: Cli, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierfall.backends.posix.writer import PosixWriter

    def fail(*words: object, **more: object) -> None:
        raise StorageFullError("no space here")

    owner: Any = PosixWriter if when in ("write", "publish") else PosixBackend
    monkeypatch.setattr(owner, when, fail)
    before = files_below(tmp_path)
    answer = cli("check", *SMALL, code=1)
    assert answer.err.count("no space here") == 2
    assert files_below(tmp_path) == before
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["run"]


def test_a_probe_that_cannot_be_removed_is_reported(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: object) -> None:
        raise StorageFullError("cannot be removed")

    monkeypatch.setattr(PosixBackend, "delete", fail)
    for also in ((), ("read_into",)):
        for method in also:
            monkeypatch.setattr(PosixBackend, method, fail)
        err = cli("check", *SMALL, code=1).err
        assert "tierfall-check-" in err
        assert err.count("/probe may be left in ") == 2


def test_an_interrupt_keeps_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PosixBackend, "stat", interrupt)
    before = files_below(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        measure.measure(load_config(cli.path), 1000)
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("moment", ["writing", "written"])
def test_what_a_killed_check_left_goes_with_the_next_one(
    cli: Cli, tmp_path: Path, moment: str
) -> None:
    before = files_below(tmp_path)
    pid = os.fork()
    if not pid:
        if moment == "writing":
            measure.run_in_threads = lambda threads, do, numbers: do(0) or os._exit(0)  # type: ignore[assignment]
        measure._timed = lambda do: do() or os._exit(0)  # type: ignore[assignment]
        measure.measure(load_config(cli.path), 300 << 10)
    os.waitpid(pid, 0)
    left = set(files_below(tmp_path)) - set(before)
    assert len(left) == 1
    assert left.pop().endswith("/probe") is (moment == "written")
    other = tmp_path / "disk" / "tierfall-check-elsewhere" / "1" / "probe"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"another node's")
    cli("check", *SMALL)
    assert set(files_below(tmp_path)) - set(before) == {str(other.relative_to(tmp_path))}


def test_the_parts_that_a_killed_check_uploaded_go_too(
    cli: Cli, s3_server: SeaweedFS, bucket: str
) -> None:
    with_store(cli, f"s3://{bucket}/checkpoints", s3_server.options())
    killed = open_backend(f"s3://{bucket}/checkpoints", options=s3_server.options())
    assert isinstance(killed, ObjectStoreBackend)
    for key in (f"{measure._folder()}1/probe", "run/step-00000001-a0001/x"):
        killed.create(key, length=20 << 20).write(0, memoryview(bytes(10 << 20)))
    cli("check", "--size", "1MiB")
    left = [key for key, _ in killed._client.pending(killed._client.prefix, "look")]
    killed.close()
    assert left == ["checkpoints/run/step-00000001-a0001/x"]


def test_storage_that_gives_back_other_bytes_is_found(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PosixBackend.read_into

    def flip(self: Any, key: str, offset: int, view: memoryview) -> None:
        real(self, key, offset, view)
        if "probe" in key and offset == 131_072:
            view[5] ^= 1

    monkeypatch.setattr(PosixBackend, "read_into", flip)
    answer = cli("check", *SMALL, code=1)
    assert answer.err.count("differs from what was written, at byte 131072") == 2


def test_a_disk_without_room_is_not_filled(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_free_bytes", lambda folder: 400 << 10)
    answer = cli("check", *SMALL, code=1)
    assert answer.err.count("400 KiB are free, so 300 KiB were not written") == 2
    assert "smaller --size" in answer.err
    cli("check", "--size", "200KiB")


def test_a_capacity_is_kept(cli: Cli, tmp_path: Path) -> None:
    """What lies there counts: one step, of some 145 KiB."""
    cli.config["tiers"][2]["capacity"] = "400KiB"
    cli.configure(cli.config)
    before = files_below(tmp_path)
    document = cli.json("check", *SMALL, code=1)
    (problem,) = document["problems"]
    assert "tier far: " in problem
    assert "of the capacity of 400 KiB there is room for " in problem
    assert "so 300 KiB were not written: measure with a smaller --size" in problem
    assert tier(document, "disk")["write_bytes_per_s"] > 0
    assert tier(document, "far")["write_bytes_per_s"] is None
    assert files_below(tmp_path) == before
    cli("check", "--size", "200KiB")


def test_a_tier_whose_use_cannot_be_listed_is_reported(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: TierCatalog) -> None:
        raise UnreachableError("no answer")

    monkeypatch.setattr(TierCatalog, "list", fail)
    assert cli.json("check", *SMALL, code=1)["problems"] == ["tier far: no answer"]


def test_memory_whose_room_cannot_be_asked_is_reported(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise UnreachableError("no answer")

    monkeypatch.setattr(measure, "room_for_arena", fail)
    document = cli.json("check", *SMALL, code=1)
    assert tier(document, "host")["error"] == "no answer"


def test_before_the_first_start_memory_has_no_folder_yet(
    make_cli: MakeCli, tmp_path: Path, memory: Path
) -> None:
    cli = make_cli(host={"folder": str(memory / "not" / "yet")})
    (tmp_path / "disk").mkdir()
    document = cli.json("check", *SMALL)
    assert tier(document, "host")["free_bytes"] > 0
    assert list(memory.iterdir()) == []


def test_one_byte_can_be_measured(cli: Cli) -> None:
    assert tier(cli.json("check", "--size", "1B"), "disk")["read_bytes_per_s"] > 0


def with_store(cli: Cli, url: str, options: dict[str, Any]) -> None:
    store = {"name": "store", "kind": "object", "url": url, "options": options}
    cli.configure({**cli.config, "tiers": [*cli.config["tiers"], store]})


def test_an_object_store_is_measured_and_no_credential_is_shown(
    cli: Cli, s3_server: SeaweedFS, bucket: str
) -> None:
    with_store(cli, f"s3://{bucket}/checkpoints", s3_server.options())
    for words in ((), ("--json",)):
        answer = cli("check", "--size", "12MiB", *words)
        assert KEY not in answer.out + answer.err
        assert SECRET not in answer.out + answer.err
    found = tier(cli.json("check", "--size", "12MiB"), "store")
    assert found["write_bytes_per_s"] > 1000
    assert (found["place"], found["fenced"]) == (f"s3://{bucket}/checkpoints", True)
    assert found["free_bytes"] is None
    assert s3_server.bucket(bucket).keys() == []


def test_a_store_that_does_not_answer_shows_no_credential(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "access-me", "secret": "hunter2!"}
    with_store(cli, "s3://bucket/checkpoints", options)
    for words in ((), ("--json",)):
        answer = cli("check", *SMALL, *words, code=1)
        assert "store" in answer.err
        for secret in ("access-me", "hunter2"):
            assert secret not in answer.out + answer.err


def test_the_probe_is_noise(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compresses, or is the same everywhere, would flatter a store."""
    asked: list[int] = []
    real = os.urandom
    monkeypatch.setattr(measure.os, "urandom", lambda n: asked.append(n) or real(n))
    cli("check", *SMALL)
    assert sum(asked) == 2 * (64 << 10)
