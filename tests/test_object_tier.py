"""A run whose last tier is a real S3 server: which failures it survives, what it reports, and what it sends."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests import forked
from tests.cli.cli_kit import run
from tests.object_store import KEY, SECRET, SeaweedFS
from tests.steps import blank, open_elsewhere, state_of, step_in, wait_until
from tests.throttling_proxy import ThrottlingProxy
from tierfall.backends import open
from tierfall.core.types.errors import AccessDeniedError, BackendError, FencedError, RestoreError
from tierfall.core.types.values import CopyState

Make = Callable[..., dict[str, Any]]
CODECS = ["none", "zstd", "planes"]
PATIENCE_S = 120.0
MIB = 1 << 20


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[SeaweedFS]:
    """A server that a test may kill."""
    (tmp_path / "seaweedfs").mkdir()
    server = SeaweedFS(tmp_path / "seaweedfs")
    server.start()
    server.make_bucket("bucket")
    yield server
    server.kill()


def store_tier(server: SeaweedFS, bucket: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "store",
        "kind": "object",
        "url": f"s3://{bucket}/checkpoints",
        "options": server.options(),
        **more,
    }


@pytest.fixture
def with_store(make_config: Make, s3_server: SeaweedFS, bucket: str) -> Make:
    """``with_store({...}, disk={}, ...)``: the chain of make_config, and behind it a tier on the server."""

    def make(more: dict[str, Any] | None = None, **words: Any) -> dict[str, Any]:
        config = make_config(**{"host": {"capacity": "64MiB"}, **words})
        config["tiers"].append(store_tier(s3_server, bucket, **(more or {})))
        return config

    return make


def large(step: int, *, mib: int = 24) -> dict[str, Any]:
    """Noise, which does not compress, so that the sizes of uploads are known."""
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, generator=generator),
        "extra": {"step": step},
    }


def only_store(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration of a machine that has nothing but the way to the store."""
    host = {"name": "host", "kind": "host", "folder": str(folder), "capacity": "256MiB"}
    return {**config, "tiers": [host, config["tiers"][-1]]}


def uploads_on(server: SeaweedFS, bucket: str) -> list[Any]:
    """Unfinished uploads, as another client lists them."""
    backend = open.open_backend(
        f"s3://{bucket}", options=server.options(), driver=None, read_only=True
    )
    try:
        return list(backend._client.uploads.pending("", "list"))  # type: ignore[attr-defined]
    finally:
        backend.close()


# What it is for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "zstd", "planes"])
def test_a_run_whose_node_is_gone_restores_from_the_store_alone_in_a_fresh_process(
    with_store: Make, tmp_path: Path, memory: Path, codec: str
) -> None:
    config = with_store({"compress": {"codec": codec}}, disk={})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, large(1, mib=6))
        ckpt.save(2, large(2, mib=6), metrics={"loss": 0.5}, tags=["good"])
        ckpt.save(2 + 1, large(3, mib=6), block=True)
    shutil.rmtree(tmp_path / "disk")
    shutil.rmtree(memory / "run", ignore_errors=True)
    fresh = only_store(config, tmp_path / "elsewhere")
    (tmp_path / "fresh.json").write_text(json.dumps(fresh))
    code = """
        import json, sys, torch, tierfall
        config = json.load(open(sys.argv[1]))
        state = {"w": torch.zeros(6 << 20, dtype=torch.uint8), "extra": {"step": -1}}
        with tierfall.open(config) as ckpt:
            report = ckpt.restore(state)
            assert report.step == 3, report
            assert {s.tier for s in report.sources} == {"store"}, report
            assert [c.step for c in ckpt.checkpoints()] == [1, 2, 3]
            expected = torch.randint(0, 256, (6 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
            assert torch.equal(state["w"], expected) and state["extra"] == {"step": 3}
            ckpt.save(4, state, block=True)
        print("restored")
    """
    done = forked.run(["-c", textwrap.dedent(code), str(tmp_path / "fresh.json")])
    assert done.stdout == "restored\n", done.stderr
    loaded = tierfall.load(fresh, step=2)
    assert torch.equal(loaded["w"], large(2, mib=6)["w"])


def test_the_object_is_the_local_shard_to_the_byte(
    with_store: Make, s3_server: SeaweedFS, bucket: str, tmp_path: Path
) -> None:
    with tierfall.open(with_store({}, disk={})) as ckpt:
        ckpt.save(1, large(1), block=True)
    (shard,) = (tmp_path / "disk").glob("run/step-*/*.safetensors")
    key = f"checkpoints/{shard.relative_to(tmp_path / 'disk')}"
    assert s3_server.bucket(bucket).get(key) == shard.read_bytes()


def test_zstd_on_a_flushed_object_gives_the_bytes_of_the_local_shard(
    with_store: Make, s3_server: SeaweedFS, bucket: str, tmp_path: Path
) -> None:
    config = with_store({"compress": {"codec": "zstd", "level": 3}}, disk={})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, large(1), block=True)
    (shard,) = (tmp_path / "disk").glob("run/step-*/*.safetensors")
    key = f"checkpoints/{shard.relative_to(tmp_path / 'disk')}.zst"
    packed = tmp_path / "object.zst"
    packed.write_bytes(s3_server.bucket(bucket).get(key))
    program = shutil.which("zstd")
    if program is None:
        pytest.skip("no zstd program here")
    done = subprocess.run([program, "-dc", str(packed)], capture_output=True, check=True)
    assert done.stdout == shard.read_bytes()


@pytest.mark.parametrize("order", [("store", "disk"), ("disk", "store", "far"), ("store", "far")])
def test_objects_may_stand_anywhere_in_the_chain_and_more_than_once(
    with_store: Make, s3_server: SeaweedFS, bucket: str, tmp_path: Path, order: tuple[str, ...]
) -> None:
    config = with_store(disk={})
    tiers = {tier["name"]: tier for tier in config["tiers"]}
    tiers["far"] = {
        **store_tier(s3_server, bucket, compress={"codec": "planes"}),
        "name": "far",
        "url": f"s3://{bucket}/elsewhere",
    }
    config["tiers"] = [tiers["host"], *(tiers[name] for name in order)]
    with tierfall.open(config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step))
        assert ckpt.drain().left == ()
        (_, newest) = ckpt.checkpoints()
        assert newest.tiers == {
            "host": CopyState.SEALED,
            **{name: CopyState.COMMITTED for name in order},
        }
        assert ckpt.statistics().newest["site"] == 2  # type: ignore[index]
    for name in order:
        alone = {**config, "tiers": [config["tiers"][0], tiers[name]]}
        assert step_in(tierfall.load(alone)) == 2


def test_retention_and_deletion_reach_the_store(
    with_store: Make, s3_server: SeaweedFS, bucket: str
) -> None:
    store = s3_server.bucket(bucket)

    def steps() -> set[str]:
        return {key.split("/")[2] for key in store.keys("checkpoints/run/")} - {
            "attempts",
            "latest",
            "lineage",
            "marks-changed",
            "tier.json",
        }

    with tierfall.open(with_store({"retain": {"last": 2}})) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state_of(step), block=True)
        two = {"step-00000004-a0001", "step-00000005-a0001"}
        wait_until(lambda: steps() == two, "older ones are gone", PATIENCE_S)
        ckpt.delete(4)
        assert steps() == {"step-00000005-a0001"}


@pytest.mark.parametrize("more", [{}, {"driver": "fsspec"}])
def test_a_second_start_fences_the_first_over_the_store(
    with_store: Make, tmp_path: Path, more: dict[str, Any]
) -> None:
    config = with_store(more)
    config["tiers"] = [config["tiers"][0], config["tiers"][-1]]
    with tierfall.open({**config, "on_error": "raise"}) as first:
        first.save(1, state_of(1), block=True)
        with open_elsewhere(only_store(config, tmp_path / "elsewhere")) as second:
            assert second.restore(blank()) is not None
            handle = first.save(2, state_of(2))
            with pytest.raises(FencedError, match="followed by attempt 2"):
                handle.wait(timeout=PATIENCE_S)
            second.save(2, state_of(2), block=True)
        with pytest.raises(FencedError):
            first.save(3, state_of(3))
        with pytest.raises(FencedError):
            first.close()


def test_a_large_image_goes_by_s3fs_and_leaves_no_upload(
    with_store: Make, s3_server: SeaweedFS, bucket: str, tmp_path: Path
) -> None:
    config = with_store({"driver": "fsspec"})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, large(1), block=True)
    loaded = tierfall.load(only_store(config, tmp_path / "elsewhere"))
    assert torch.equal(loaded["w"], large(1)["w"])
    assert uploads_on(s3_server, bucket) == []


# Outages ----------------------------------------------------------------------------------------------


def sent_bytes(ckpt: tierfall.Checkpointer) -> int:
    return sum(n for edge, n in ckpt.statistics().edge_bytes.items() if edge.endswith("->store"))


@pytest.mark.parametrize("codec", ["zstd", "none"])
def test_a_store_that_dies_in_mid_flush_and_comes_back_is_sent_the_rest_and_no_more(
    make_config: Make,
    own_server: SeaweedFS,
    caplog: pytest.LogCaptureFixture,
    codec: str,
) -> None:
    caplog.set_level(logging.INFO, logger="tierfall")
    more = {"bandwidth": "6MB/s", "compress": {"codec": codec}}
    config = make_config(disk={}, chunk="1MiB", max_wait="2s", host={"capacity": "256MiB"})
    config["tiers"].append(store_tier(own_server, "bucket", **more))
    with tierfall.open(config) as ckpt:
        first = ckpt.save(1, large(1, mib=16))
        first.wait("disk", timeout=PATIENCE_S)
        wait_until(lambda: sent_bytes(ckpt) > 4 * MIB, "a quarter is sent", PATIENCE_S)
        own_server.kill()
        assert not first.done("store")
        second = ckpt.save(2, large(2, mib=16))  # training goes on
        second.wait("disk", timeout=PATIENCE_S)
        wait_until(
            lambda: any(r.levelno == logging.ERROR for r in caplog.records),
            "it is said",
            PATIENCE_S,
        )
        with pytest.raises(tierfall.errors.FlushError, match="still being tried"):
            second.wait("store", timeout=1)
        own_server.start()
        wait_until(lambda: second.done("store"), "all is flushed", PATIENCE_S)
        assert first.done("store")
        image = ckpt.checkpoints()[0].bytes
        assert sent_bytes(ckpt) == 2 * image, "each chunk was brought once"
        statistics = ckpt.statistics()
        assert statistics.flush_failures > 0
        assert statistics.commits["store"] == 2
    output = [
        r for r in caplog.records if r.levelno >= logging.WARNING and "store" in r.getMessage()
    ]
    assert [r.levelname for r in output] == ["WARNING", "ERROR", "ERROR"], [
        r.getMessage() for r in output
    ]
    assert output[-1].getMessage().startswith("tier store accepts copies again")
    assert uploads_on(own_server, "bucket") == []
    for step in (1, 2):
        alone = {**config, "tiers": [config["tiers"][0], config["tiers"][-1]]}
        assert torch.equal(tierfall.load(alone, step=step)["w"], large(step, mib=16)["w"])


def test_throttling_is_reported_once_counted_and_waited_out(
    make_config: Make,
    s3_server: SeaweedFS,
    bucket: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="tierfall")
    with ThrottlingProxy(s3_server.endpoint) as proxy:
        config = make_config(chunk="1MiB", host={"capacity": "64MiB"})
        tier = store_tier(s3_server, bucket)
        tier["options"] = s3_server.options(endpoint_url=proxy.endpoint)
        config["tiers"] = [config["tiers"][0], tier]
        with tierfall.open(config) as ckpt:
            ckpt.save(1, large(1, mib=8), block=True)
            proxy.throttled.set()
            handle = ckpt.save(2, large(2, mib=8))
            wait_until(lambda: ckpt.statistics().flush_failures > 1, "it fails twice", PATIENCE_S)
            assert not handle.done("store")
            with pytest.raises(RestoreError, match="store could not be read"):
                tierfall.load(config)
            proxy.throttled.clear()
            handle.wait("store", timeout=PATIENCE_S)
        assert proxy.refused > 5
        assert torch.equal(tierfall.load(config)["w"], large(2, mib=8)["w"])
    output = [
        r
        for r in caplog.records
        if r.levelno >= logging.WARNING and "flush of 2@1" in r.getMessage()
    ]
    assert len(output) == 1, [r.getMessage() for r in output]
    assert "503" in output[0].getMessage()


def test_a_listing_that_fails_is_never_an_empty_one(
    make_config: Make, s3_server: SeaweedFS, bucket: str, tmp_path: Path
) -> None:
    with ThrottlingProxy(s3_server.endpoint) as proxy:
        config = make_config(disk={}, host={"capacity": "64MiB"})
        tier = store_tier(s3_server, bucket)
        tier["options"] = s3_server.options(endpoint_url=proxy.endpoint)
        config["tiers"].append(tier)
        with tierfall.open(config) as ckpt:
            ckpt.save(1, state_of(1), block=True)
        shutil.rmtree(tmp_path / "disk")
        proxy.lists_fail.set()
        with (
            tierfall.open(config) as ckpt,
            pytest.raises(RestoreError, match="tier store could not be read"),
        ):
            ckpt.restore(blank())
        with pytest.raises(RestoreError, match="store could not be read"):
            tierfall.load(config)
        proxy.lists_fail.clear()
        assert step_in(tierfall.load(config)) == 1, "and nothing was collected meanwhile"


def test_no_server_is_reported_and_never_taken_for_nothing_there(
    make_config: Make,
    tmp_path: Path,
    own_server: SeaweedFS,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_config(disk={})
    config["tiers"].append(store_tier(own_server, "bucket"))
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    shutil.rmtree(tmp_path / "disk")
    own_server.kill()
    with tierfall.open(config) as ckpt:
        with pytest.raises(RestoreError, match="tier store could not be read"):
            ckpt.restore(blank())
        with pytest.raises(RestoreError, match="it is not known whether this is a first start"):
            ckpt.restore(blank(), unreachable="ignore")
    output = [r for r in caplog.records if "open: goes on without tier store" in r.getMessage()]
    assert len(output) == 1
    with pytest.raises(RestoreError, match="store could not be read"):
        tierfall.load(config)
    own_server.start()
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(state := blank())
    assert report is not None
    assert step_in(state) == 1


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"options": {"secret": "wrong-" + SECRET}}, AccessDeniedError, "check the key"),
        ({"options": {"key": "nobody"}}, AccessDeniedError, "check the key"),
        ({"url": "s3://no-such-bucket/checkpoints"}, BackendError, "bucket"),
    ],
)
def test_what_will_not_pass_is_refused_at_open_with_the_tier_and_what_to_do(
    with_store: Make, change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    config = with_store({})
    tier = config["tiers"][-1]
    tier["options"] = {**tier["options"], **change.get("options", {})}
    tier["url"] = change.get("url", tier["url"])
    with pytest.raises(kind, match=f"tier store: .*{message}") as caught:
        tierfall.open(config)
    told = "".join(traceback.format_exception(caught.value))
    assert SECRET not in told
    assert KEY not in told
    with pytest.raises(RestoreError, match="store could not be read"):
        tierfall.load(config)


# What is never shown ----------------------------------------------------------------------------------


def test_credentials_stand_nowhere(
    with_store: Make,
    s3_server: SeaweedFS,
    bucket: str,
    tmp_path: Path,
    memory: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    config = with_store(disk={})
    options = config["tiers"][-1]["options"]
    told: list[str] = []
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        told += [repr(ckpt), repr(ckpt.statistics()), repr(ckpt.checkpoints()), repr(vars(ckpt))]
        told += [repr(ckpt._session.stores["store"].backend), repr(ckpt._session.config)]
        held = b"".join(p.read_bytes() for p in memory.rglob("*") if p.is_file())
        assert SECRET.encode() not in held
    written = b"".join(p.read_bytes() for p in (tmp_path / "disk").rglob("*") if p.is_file())
    store = s3_server.bucket(bucket)
    written += b"".join(map(store.get, store.keys()))
    assert SECRET.encode() not in written
    assert KEY.encode() not in written
    path = tmp_path / "config.json.yaml"
    options = {**options, "key": "${env:TEST_KEY}", "secret": "${env:TEST_SECRET}"}
    config["tiers"][-1]["options"] = options
    path.write_text(json.dumps(config))
    monkeypatch.setenv("TEST_KEY", KEY)
    for environment in (SECRET, "wrong" + SECRET):
        monkeypatch.setenv("TEST_SECRET", environment)
        for command in ("ls", "show 1", "verify", "check", "prune --dry-run"):
            answer = run([*command.split(), "--config", str(path), "--json"])
            told += [answer.out, answer.err]
    told += [record.getMessage() for record in caplog.records]
    for text in told:
        assert SECRET not in text
        assert KEY not in text


# What is left behind ----------------------------------------------------------------------------------


def test_uploads_that_a_crash_left_are_collected_by_the_next_start(
    with_store: Make, s3_server: SeaweedFS, bucket: str, tmp_path: Path
) -> None:
    config = with_store({"bandwidth": "8MB/s"}, disk={}, chunk="1MiB", host={"capacity": "128MiB"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = """
        import json, sys, time, torch, tierfall
        ckpt = tierfall.open(json.load(open(sys.argv[1])))
        ckpt.save(1, {"w": torch.randint(0, 256, (40 << 20,), dtype=torch.uint8), "extra": {"step": 1}})
        while not any(n > 10 << 20 for e, n in ckpt.statistics().edge_bytes.items() if e == "host->store"):
            time.sleep(0.05)
        print("half", flush=True)
        time.sleep(600)
    """
    process = forked.start(["-c", textwrap.dedent(code), str(tmp_path / "config.json")])
    try:
        assert process.stdout.readline() == b"half\n"
    finally:
        process.kill()
        process.wait()
        process.close()
    assert len(uploads_on(s3_server, bucket)) == 1
    config["tiers"][-1].pop("bandwidth")
    with tierfall.open(config) as ckpt:
        assert (
            ckpt.restore({"w": torch.zeros(40 * MIB, dtype=torch.uint8), "extra": {}}) is not None
        )
        ckpt.drain()
        (info,) = ckpt.checkpoints()
        assert info.tiers["store"] is CopyState.COMMITTED
    assert uploads_on(s3_server, bucket) == []


def test_drain_brings_what_a_dead_trainer_left_to_the_store(
    with_store: Make, tmp_path: Path, memory: Path
) -> None:
    config = with_store(host={"capacity": "64MiB"})
    config["tiers"] = [config["tiers"][0], config["tiers"][-1]]
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    code = """
        import os, sys, signal, threading, torch, tierfall
        from tierfall.tiers.stored import StoredTier
        ckpt = tierfall.open(sys.argv[1])
        StoredTier.create_shard = lambda *a: threading.Event().wait()
        ckpt.save(1, {"w": torch.full((6 << 20,), 7, dtype=torch.uint8)}).captured()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = forked.run(["-c", textwrap.dedent(code), str(path)])
    assert done.returncode == -signal.SIGKILL
    drained = forked.run(["-m", "tierfall", "drain", "--config", str(path), "--json"])
    assert drained.returncode == 0, drained.stderr
    assert (tierfall.load(only_store(config, tmp_path / "elsewhere"))["w"] == 7).all()


def test_a_run_that_is_closed_in_mid_flush_is_finished_by_the_next_start(
    with_store: Make, s3_server: SeaweedFS, bucket: str
) -> None:
    config = with_store(
        {"bandwidth": "4MB/s"}, chunk="1MiB", max_wait="1s", host={"capacity": "128MiB"}
    )
    config["tiers"] = [config["tiers"][0], config["tiers"][-1]]
    ckpt = tierfall.open(config)
    ckpt.save(1, large(1, mib=40))
    wait_until(lambda: sent_bytes(ckpt) > 6 * MIB, "it is on its way", PATIENCE_S)
    assert len(uploads_on(s3_server, bucket)) == 1
    ckpt.close()  # what a thread that is still sending leaves behind, the next start collects
    config["tiers"][-1].pop("bandwidth")
    with tierfall.open(config) as again:
        assert again.restore(state := large(9, mib=40)) is not None
        assert again.drain().left == ()
    assert torch.equal(state["w"], large(1, mib=40)["w"])
    assert uploads_on(s3_server, bucket) == []


# Memory -----------------------------------------------------------------------------------------------

MEMORY = """
    import json, sys, threading, time
    import torch, tierfall

    def anonymous():
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        return int(fields["RssAnon"].split()[0]) << 10

    config, mib = json.load(open(sys.argv[1])), int(sys.argv[2])
    state = {f"w{i}": (torch.randn(mib << 12) * 0.02).to(torch.bfloat16) for i in range(128)}
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"w": torch.randn(5 << 20).to(torch.bfloat16)}, block=True)  # what is kept is taken now
        before, peak, stop = anonymous(), [0], threading.Event()

        def watch():
            while not stop.wait(0.01):
                peak[0] = max(peak[0], anonymous())

        watcher = threading.Thread(target=watch)
        watcher.start()
        ckpt.save(2, state, block=True)
        stop.set()
        watcher.join()
    print(peak[0] - before)
"""


@pytest.mark.parametrize(
    ("codec", "mib"),
    [("none", 160), ("planes", 160)],
)
def test_a_flush_takes_no_more_memory_than_parts_times_parallel_calls(
    with_store: Make, tmp_path: Path, codec: str, mib: int
) -> None:
    """Chunks of 4 MiB, four of which are on their way at once; a 160 MiB image.

    They are sent from where they lie; whoever packs holds for each thread the planes, a frame and a part of 8 MiB, and
    one frame more.
    """
    config = with_store(
        {"compress": {"codec": codec}},
        chunk="4MiB",
        max_wait="60s",
        host={"capacity": f"{mib + 96}MiB"},
    )
    config["tiers"] = [config["tiers"][0], config["tiers"][-1]]
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = forked.run(
        ["-c", textwrap.dedent(MEMORY), str(tmp_path / "config.json"), str(mib)], timeout=280
    )
    assert done.returncode == 0, done.stderr
    packers = 1 + max(1, min(os.cpu_count() or 1, 4))
    print(f"{codec}: {int(done.stdout) / MIB:.1f} MiB")
    bound_mib = {"none": 4 * 4, "planes": packers * (4 + 4 + 8) + 4}[codec]
    assert int(done.stdout) >> 20 < bound_mib + 16
