"""A tier on an S3 server: what is there, what is restored from it alone, and what an outage does."""

from __future__ import annotations

import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

import tierfall
from tests.contract.kit import (
    Place,
    blank,
    equal,
    files_below,
    restored,
    state_of,
    step_in,
    wait_until,
)
from tests.object_store import KEY, SECRET, SeaweedFS
from tests.throttling_proxy import ThrottlingProxy
from tierfall.errors import BackendError, RestoreError, TierfallError

SOON_S = 60.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A running S3 server, one for this file; a write to a missing bucket makes it."""
    made = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"), makes_buckets=True)
    made.start()
    made.make_bucket("contract")
    yield made
    made.kill()


class Bucket:
    """A prefix of its own in the server's bucket, as another client sees it."""

    def __init__(self, server: SeaweedFS) -> None:
        self.server = server
        self.prefix = secrets.token_hex(6)
        self._bucket = server.bucket("contract")

    def tier(self, **settings: Any) -> dict[str, Any]:
        url = f"s3://contract/{self.prefix}"
        return {"kind": "object", "url": url, "options": self.server.options(), **settings}

    def names(self) -> list[str]:
        prefix = f"{self.prefix}/"
        return [key.removeprefix(prefix) for key in self._bucket.keys(prefix)]

    def get(self, key: str) -> bytes:
        return self._bucket.get(f"{self.prefix}/{key}")

    def steps(self) -> list[int]:
        return sorted(int(k.split("/")[1][5:13]) for k in self.names() if k.endswith("commit.json"))

    def uploads(self) -> int:
        client = self._bucket.client
        found = client.list_multipart_uploads(Bucket="contract", Prefix=f"{self.prefix}/")
        return len(found.get("Uploads", ()))


@pytest.fixture
def bucket(server: SeaweedFS) -> Bucket:
    return Bucket(server)


def noise(step: int, *, mib: int = 12) -> dict[str, Any]:
    """What no codec makes smaller: several parts of an upload."""
    generator = torch.Generator().manual_seed(step)
    w = torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, generator=generator)
    return {"w": w, "extra": {"step": step}}


def elsewhere(place: Place) -> Place:
    """The run on another machine, which has nothing but the way to the store."""
    other = Place(place.root / "elsewhere", place.root / "elsewhere memory")
    other.root.mkdir()
    return other


def test_a_lost_machine_is_restored_from_the_store_alone(place: Place, bucket: Bucket) -> None:
    """Bit for bit, with metrics, tags and pins; retention and deletion have reached the store."""
    words: dict[str, Any] = {"host": {"capacity": "64MiB"}, "chunk": "1MiB"}
    place.config(disk={}, store=bucket.tier(retain={"last": 2}), **words)
    with place.open() as ckpt:
        for step in (1, 2, 3):
            state = noise(step, mib=12 if step == 3 else 1)
            ckpt.save(step, state, metrics={"loss": 0.5}, tags=["t"], block=True)
        ckpt.pin(2)
        assert ckpt.statistics().newest["site"] == 3
    wait_until(lambda: bucket.steps() == [2, 3], "step 1 goes")
    shutil.rmtree(place.root / "disk")
    shutil.rmtree(place.memory / "run", ignore_errors=True)
    other = elsewhere(place)
    other.config(store=bucket.tier(), **words)
    with other.open() as ckpt:
        state = noise(9)
        report = ckpt.restore(state)
        assert report is not None
        assert {s.tier for s in report.sources} == {"store"}
        assert equal(state["w"], noise(3)["w"])
        assert [(c.step, c.pinned, c.tags, c.metrics) for c in ckpt.checkpoints()] == [
            (2, True, ("t",), {"loss": 0.5}),
            (3, False, ("t",), {"loss": 0.5}),
        ]
        ckpt.unpin(2)
        ckpt.delete(2)
        assert bucket.steps() == [3]
    assert bucket.uploads() == 0


def test_an_object_is_the_shard_of_a_folder_to_the_byte(
    place: Place, server: SeaweedFS, bucket: Bucket
) -> None:
    packed = Bucket(server)
    place.config(
        host={"capacity": "64MiB"},
        chunk="1MiB",
        disk={},
        store=bucket.tier(),
        packed=packed.tier(compress={"codec": "zstd"}),
    )
    with place.open() as ckpt:
        ckpt.save(1, noise(1), block=True)
    name = "step-00000001-a0001/rank-00000-of-00001.safetensors"
    shard = (place.root / "disk/run" / name).read_bytes()
    assert bucket.get(f"run/{name}") == shard
    found = packed.get(f"run/{name}.zst")
    reader = zstandard.ZstdDecompressor().stream_reader(found, read_across_frames=True)
    assert reader.read() == shard
    assert bucket.get("run/latest") == packed.get("run/latest") == b"step-00000001-a0001\n"


def test_two_prefixes_of_a_bucket_are_two_tiers(
    place: Place, server: SeaweedFS, bucket: Bucket
) -> None:
    """The store may be anywhere behind memory, and more than once."""
    second = Bucket(server)
    place.config(first=bucket.tier(), disk={}, second=second.tier(compress={"codec": "planes"}))
    place.save(1, 2)
    assert bucket.steps() == second.steps() == [1, 2]
    with place.open() as ckpt:
        for tier in ("first", "second"):
            assert restored(ckpt, tier=tier).step == 2


def test_an_address_in_place_of_a_file_is_read_with_the_credentials_of_the_environment(
    place: Place, bucket: Bucket
) -> None:
    place.config(store=bucket.tier())
    place.save(1)
    environment = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": bucket.server.endpoint,
    }
    from tests.contract.kit import tierfall_command

    url = f"s3://contract/{bucket.prefix}"
    answer = tierfall_command("latest", "--config", url, cwd=place.root, **environment)
    assert (answer.code, answer.out) == (0, "1@1\n"), answer.err


def test_wrong_keys_and_a_missing_bucket_are_refused_with_what_to_do(
    place: Place, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    tier = bucket.tier()
    for change, words in (
        ({"url": "s3://no-such-bucket/x"}, "there is no such bucket; make it, or name another"),
        ({"url": "s3://no-such-bucket/x", "driver": "fsspec"}, "there is no such bucket"),
        ({"options": bucket.server.options(secret="wrong-secret")}, "(?i)key|denied|credential"),
    ):
        place.config(store={**tier, **change})
        with pytest.raises(BackendError, match=words) as raised:
            place.open()
        assert "store" in str(raised.value)
        assert "wrong-secret" not in str(raised.value)
        answer = place.cli("check", "--size", "4KiB", code=1)
        assert "wrong-secret" not in answer.out + answer.err
    assert "wrong-secret" not in caplog.text
    made = bucket.server.client().list_buckets()["Buckets"]
    assert [entry["Name"] for entry in made] == ["contract"]


def test_credentials_are_in_no_file_and_no_message(
    place: Place, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    place.config(disk={}, store=bucket.tier(), events="./events.jsonl")
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.write_pointer(place.root / "out", 1)
        written = [str(ckpt.statistics()), str(ckpt.metrics_dict())]
    place.yaml.rename(place.yaml.with_suffix(".kept"))
    (place.root / "tiers.kept").rename(kept := place.root.parent / f"{bucket.prefix}.yaml")
    for root in (place.root, place.memory):
        assert not [name for name, data in files_below(root).items() if SECRET.encode() in data]
    assert not [key for key in bucket.names() if SECRET.encode() in bucket.get(key)]
    kept.rename(place.yaml)
    for words in ("ls", "show 1", "check --size 4KiB", "watch --once"):
        answer = place.cli(*words.split(), "--json")
        written += [answer.out, answer.err]
    assert SECRET not in "\n".join([*written, caplog.text])


def test_a_store_that_answers_503_is_waited_for_and_reported_once(
    place: Place, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    with ThrottlingProxy(bucket.server.endpoint) as proxy:
        tier = bucket.tier()
        tier["options"] = bucket.server.options(endpoint_url=proxy.endpoint)
        place.config(disk={}, store=tier)
        with place.open() as ckpt:
            ckpt.save(1, state_of(1), block=True)
            proxy.throttled.set()
            handle = ckpt.save(2, state_of(2))
            handle.wait("disk", timeout=SOON_S)
            wait_until(lambda: ckpt.statistics().flush_failures["store"] > 0, "it fails", SOON_S)
            assert not handle.done("store")
            proxy.throttled.clear()
            assert ckpt.drain(deadline=SOON_S).left == ()
        with place.open() as ckpt:
            proxy.throttled.set()
            threading.Timer(0.7, proxy.throttled.clear).start()
            assert restored(ckpt, tier="store").step == 2, "it asks again"
    said = [m for m in (r.getMessage() for r in caplog.records) if re.search("2@1.*store.*503", m)]
    assert len(said) == 1
    assert bucket.steps() == [1, 2]
    assert bucket.uploads() == 0


def test_a_listing_that_fails_is_never_an_empty_one(place: Place, bucket: Bucket) -> None:
    with ThrottlingProxy(bucket.server.endpoint) as proxy:
        tier = bucket.tier()
        tier["options"] = bucket.server.options(endpoint_url=proxy.endpoint)
        place.config(store=tier, max_wait="1s")
        place.save(1)
        proxy.lists_fail.set()
        with place.open() as ckpt, pytest.raises(RestoreError, match="store"):
            ckpt.restore(blank())
        proxy.lists_fail.clear()
        assert step_in(tierfall.load(place.yaml)) == 1


def test_a_server_that_is_away_holds_up_no_start_and_is_never_taken_for_nothing_there(
    place: Place, bucket: Bucket
) -> None:
    tier = bucket.tier()
    place.config(disk={}, store=tier)
    place.save(1)
    tier["options"] = bucket.server.options(endpoint_url="http://127.0.0.1:9")
    place.config(disk={}, store=tier, max_wait="1s")
    with place.open() as ckpt:
        with pytest.raises(RestoreError, match=r"(?s)store.*unreachable"):
            ckpt.restore(blank())
        assert restored(ckpt, unreachable="ignore").step == 1
    shutil.rmtree(place.root / "disk")
    place.cli("forget", "disk", code=-1)
    with place.open() as ckpt, pytest.raises(TierfallError, match="store"):
        ckpt.restore(blank())


def test_what_a_killed_process_left_of_an_upload_is_aborted_by_the_next_start(
    place: Place, bucket: Bucket
) -> None:
    """It finishes the copy from memory."""
    words: dict[str, Any] = {"host": {"capacity": "64MiB"}, "chunk": "1MiB"}
    place.config(store=bucket.tier(bandwidth="4MB/s"), **words)
    program = place.start(
        """
        ckpt = tierfall.open("tiers.yaml")
        generator = torch.Generator().manual_seed(1)
        w = torch.randint(0, 256, (12 << 20,), dtype=torch.uint8, generator=generator)
        ckpt.save(1, {"w": w, "extra": {"step": 1}}).captured()
        print("sealed")
        time.sleep(60)
        """
    )
    assert program.line() == "sealed"
    wait_until(lambda: bucket.uploads() > 0, "it is under way", SOON_S)
    program.kill()
    assert bucket.steps() == []
    place.config(store=bucket.tier(), **words)
    with place.open() as ckpt:
        state = noise(9, mib=12)
        assert ckpt.restore(state) is not None
        assert equal(state["w"], noise(1, mib=12)["w"])
        assert ckpt.drain(deadline=SOON_S).left == ()
    assert bucket.steps() == [1]
    assert bucket.uploads() == 0
    assert Path(place.root).exists()


def test_of_two_starts_only_the_newer_writes_to_the_store(place: Place, bucket: Bucket) -> None:
    place.config(store=bucket.tier())
    with place.open() as ckpt:
        ckpt.save(1, state_of(1), block=True)
        other = elsewhere(place)
        other.config(store=bucket.tier())
        answer = other.run(
            """
            with tierfall.open("tiers.yaml") as ckpt:
                assert ckpt.restore(blank()).step == 1
                ckpt.save(2, state_of(2), block=True)
            """
        )
        assert answer.code == 0, answer.err
        with pytest.raises(TierfallError, match="attempt 2"):
            ckpt.save(2, state_of(20), block=True)
    assert "run/step-00000002-a0002/commit.json" in bucket.names()
    assert not [k for k in bucket.names() if "step-00000002-a0001/commit" in k]
