"""``check``: every tier is opened and measured, its guarantees are printed, and no file of it remains."""

from __future__ import annotations

import re
import socket
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
from tierfall.backends.toolkit.keys import unfinished_name
from tierfall.core.types.backend import Traits
from tierfall.core.types.errors import StorageFullError
from tierfall.ops import measure

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


@pytest.mark.parametrize("when", ["write", "publish", "stat", "read_into"])
def test_a_tier_that_fails_on_the_way_keeps_nothing(
    cli: Cli, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierfall.backends.posix.backend import PosixWriter

    def fail(*words: object, **more: object) -> None:
        raise StorageFullError("no space here")

    owner: Any = PosixWriter if when in ("write", "publish") else PosixBackend
    monkeypatch.setattr(owner, when, fail)
    before = files_below(tmp_path)
    answer = cli("check", *SMALL, code=1)
    assert answer.err.count("no space here") == 2
    assert files_below(tmp_path) == before
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["run"]


def test_what_a_killed_check_left_goes_with_the_next_one(cli: Cli, tmp_path: Path) -> None:
    before = files_below(tmp_path)
    node = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    own, other = (tmp_path / "disk" / f"tierfall-check-{of}" / "1" for of in (node, "elsewhere"))
    for folder in (own, other):
        folder.mkdir(parents=True)
        (folder / "probe").write_bytes(b"whole")
    (own / unfinished_name()).write_bytes(b"half")
    cli("check", *SMALL)
    left = set(files_below(tmp_path)) - set(before)
    assert left == {str((other / "probe").relative_to(tmp_path))}, "another node's"


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


def with_store(cli: Cli, url: str, options: dict[str, Any]) -> None:
    store = {"name": "store", "kind": "object", "url": url, "options": options}
    cli.configure({**cli.config, "tiers": [*cli.config["tiers"], store]})


def test_an_object_store_is_measured_and_no_credential_is_shown(
    cli: Cli, s3_server: SeaweedFS, bucket: str
) -> None:
    """The parts that a killed check has uploaded go, and no others."""
    url = f"s3://{bucket}/checkpoints"
    store = {"name": "store", "kind": "object", "url": url, "options": s3_server.options()}
    cli.configure({**cli.config, "tiers": [*cli.config["tiers"], store]})
    killed = open_backend(url, options=s3_server.options())
    assert isinstance(killed, ObjectStoreBackend)
    for key in (f"{measure._folder()}1/probe", "run/step-00000001-a0001/x"):
        killed.create(key, length=20 << 20).write(0, memoryview(bytes(10 << 20)))
    for words in ((), ("--json",)):
        answer = cli("check", *SMALL, *words)
        assert KEY not in answer.out + answer.err
        assert SECRET not in answer.out + answer.err
    left = [key for key, _ in killed._client.pending(killed._client.prefix, "look")]
    killed.close()
    assert left == ["checkpoints/run/step-00000001-a0001/x"]
    found = tier(answer.document, "store")
    assert found["write_bytes_per_second"] > 1000
    assert (found["place"], found["fenced"], found["free_bytes"]) == (url, True, None)
    assert s3_server.bucket(bucket).keys() == []
