"""A run whose last tier is a real S3 server: which failures it survives, what it reports, and what it sends."""

from __future__ import annotations

import json
import logging
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests import forked
from tests.object_store import SeaweedFS
from tests.steps import wait_until
from tierfall.backends import open

Make = Callable[..., dict[str, Any]]
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


def large(step: int, *, mib: int) -> dict[str, Any]:
    """Noise, which does not compress, so that the sizes of uploads are known."""
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, generator=generator),
        "extra": {"step": step},
    }


def uploads_on(server: SeaweedFS, bucket: str) -> list[Any]:
    """Unfinished uploads, as another client lists them."""
    backend = open.open_backend(
        f"s3://{bucket}", options=server.options(), driver=None, read_only=True
    )
    try:
        return list(backend._client.pending("", "list"))  # type: ignore[attr-defined]
    finally:
        backend.close()


# What it is for ---------------------------------------------------------------------------------------


# Outages ----------------------------------------------------------------------------------------------


def sent_bytes(ckpt: tierfall.Checkpointer) -> int:
    return sum(n for edge, n in ckpt.statistics().edge_bytes.items() if edge.endswith("->store"))


@pytest.mark.parametrize("codec", [pytest.param("zstd", marks=pytest.mark.torture), "none"])
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
        first = ckpt.save(1, large(1, mib=12))
        first.wait("disk", timeout=PATIENCE_S)
        wait_until(lambda: sent_bytes(ckpt) > 3 * MIB, "a quarter is read", PATIENCE_S)
        # An upload whose answer to its beginning is lost has no owner until the next start.
        wait_until(lambda: uploads_on(own_server, "bucket"), "its upload has begun", PATIENCE_S)
        own_server.kill()
        assert not first.done("store")
        second = ckpt.save(2, large(2, mib=12))  # training goes on
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
        assert statistics.flush_failures["store"] > 0
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
        assert torch.equal(tierfall.load(alone, step=step)["w"], large(step, mib=12)["w"])


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
    [("none", 64), pytest.param("planes", 160, marks=pytest.mark.torture)],
)
def test_a_flush_takes_no_more_memory_than_parts_times_parallel_calls(
    with_store: Make, tmp_path: Path, codec: str, mib: int
) -> None:
    """Chunks of 4 MiB, four of which are on their way at once; an image that is far larger.

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
