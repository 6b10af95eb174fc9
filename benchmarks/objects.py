"""What the far end of a chain costs: an S3 server on this machine, and a slow folder with and without compression.

Uploads and downloads go to the same server, one after the other, in one run. The references have a ready buffer, and
nothing to check: what an upload in parts by botocore and s3fs's ``pipe_file`` take, and botocore's reads of ranges, by
several threads. Each object goes once it was measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import s3fs
import torch

import tierfall
from benchmarks.figures import Results, ratio
from benchmarks.plan import Plan
from benchmarks.rounds import Contender, Figures, run_rounds
from benchmarks.workload import Workload, bytes_of, shape_for
from tests.object_store import SeaweedFS
from tierfall.config import load_config
from tierfall.core.copies.verify import CopyVerifier
from tierfall.core.runtime.pinned import synchronize
from tierfall.core.types.values import CheckpointId
from tierfall.ops.reader import RunReader

BUCKET = "bench"
STORE = "store"
SIZE_MAX_BYTES = 256 << 20
RANGE_BYTES = 16 << 20
"""Of a part of the references, and of a range."""
THREADS = 4
SPEED_TARGET = 1 / 0.95
THROTTLE = "25MB/s"
GAIN_TARGET = 0.9
THROTTLED_ROUNDS = 3
"""The limit makes them all alike."""
TRAINING_STEPS = 3


class Objects:
    """A server of its own, one state, and what is found."""

    def __init__(self, plan: Plan, say: Callable[[str], None], results: Results) -> None:
        self._plan = plan
        self._say = say
        self._results = results

    def run(self) -> None:
        if "objects" in self._plan.only:
            server = SeaweedFS(self._plan.folder / "server")
            try:
                server.start()
                server.make_bucket(BUCKET)
                self._transfers(server)
            finally:
                server.kill()
        if "throttled" in self._plan.only:
            self._throttled()

    def _workload(self, size_bytes: int) -> Workload:
        work = Workload(shape_for(size_bytes), device=self._plan.device)
        work.train(TRAINING_STEPS)
        return work

    def _rounds(self, title: str, contenders: list[Contender], *, most: int = 99) -> None:
        self._say(title)
        rounds = min(self._plan.rounds, most)
        found = run_rounds(contenders, rounds=rounds, seed=self._plan.seed, say=self._say)
        self._results.samples.update(found)

    def _ratio(self, name: str, subject: str, reference: str, target: float | None = None) -> None:
        found = ratio(
            name, self._results.samples, subject=subject, reference=reference, target=target
        )
        self._results.ratios.append(found)

    # The server --------------------------------------------------------------------------------------

    def _transfers(self, server: SeaweedFS) -> None:
        work = self._workload(min(self._plan.size_bytes, SIZE_MAX_BYTES))
        self._results.facts["object_state_bytes"] = bytes_of(work.tensors())
        client = server.client()
        options = server.options()
        file_system = s3fs.S3FileSystem(**options, skip_instance_cache=True)
        ready = self._image_of(work)

        def put() -> None:
            _put_parts(client, "reference", ready)

        def pipe() -> None:
            file_system.pipe_file(f"{BUCKET}/reference", ready)

        def forget() -> None:
            client.delete_object(Bucket=BUCKET, Key="reference")

        step = 0
        ckpt = tierfall.open(self._configuration("saver", self._on(options)))

        def make_room() -> None:
            nonlocal step
            if step:
                ckpt.delete(step, even_the_last=True)
                ckpt.drain()
            step += 1

        def save() -> Figures:
            began = time.perf_counter()
            handle = ckpt.save(step, work.state)
            blocked = time.perf_counter() - began
            handle.wait(STORE)
            return {"blocked": blocked}

        with ckpt:
            self._rounds(
                "upload: save to committed on the store, and uploads of a ready buffer",
                [
                    Contender(name="upload.tierfall", before=make_room, timed=save),
                    Contender(name="upload.botocore", timed=put, after=forget),
                    Contender(name="upload.s3fs", timed=pipe, after=forget),
                ],
            )
        samples = self._results.samples
        best = min(("upload.botocore", "upload.s3fs"), key=lambda n: statistics.median(samples[n]))
        self._ratio(
            "durable on the store, over the best put", "upload.tierfall", best, SPEED_TARGET
        )
        self._downloads(client, options, step + 1)

    def _downloads(self, client: Any, options: dict[str, Any], step: int) -> None:
        """At full size, which one upload pays for all rounds."""
        work = self._workload(self._plan.size_bytes)
        self._results.facts["downloaded_state_bytes"] = bytes_of(work.tensors())
        with tierfall.open(self._configuration("full", self._on(options)), fresh=True) as ckpt:
            ckpt.save(step, work.state, block=True)
            attempt = ckpt.checkpoints()[-1].attempt
        saved = [tensor.clone() for tensor in work.tensors()]
        key, size = _find_image(client, f"checkpoints/bench/step-{step:08d}-a{attempt:04d}")

        opened: list[tierfall.Checkpointer] = []

        def begin() -> None:
            work.spoil()
            opened.append(
                tierfall.open(self._configuration(f"start{time.monotonic_ns()}", self._on(options)))
            )

        def restore() -> None:
            report = opened[-1].restore(work.state)
            synchronize()
            assert report is not None
            assert [source.tier for source in report.sources] == [STORE]

        def end() -> None:
            opened.pop().close()
            if not all(map(torch.equal, work.tensors(), saved)):
                raise AssertionError("what was restored is not what was saved")

        reader = RunReader(load_config(self._configuration("reader", self._on(options))))

        def check() -> None:
            found = verifier.check_stored(reader.stores[STORE], CheckpointId(step, attempt))
            assert found.good
            assert found.bytes == size

        with reader, CopyVerifier() as verifier:
            self._rounds(
                "download: verified, restored, and ranges by several threads",
                [
                    Contender(name="download.tierfall", timed=check),
                    Contender(name="download.restore", before=begin, timed=restore, after=end),
                    Contender(
                        name="download.botocore", timed=lambda: _read_ranges(client, key, size)
                    ),
                ],
            )
        name = "download, verified, over ranges"
        self._ratio(name, "download.tierfall", "download.botocore", SPEED_TARGET)
        self._ratio("restore from the store, over ranges", "download.restore", "download.botocore")

    def _image_of(self, work: Workload) -> bytes:
        """The bytes of a state's image, ready to be sent."""
        folder = self._plan.folder / "ready"
        tier = {"name": "disk", "kind": "file", "path": str(folder)}
        with tierfall.open(self._configuration("ready", tier)) as ckpt:
            ckpt.save(1, work.state, block=True)
        return next(folder.glob("bench/step-*/*.safetensors")).read_bytes()

    def _on(self, options: dict[str, Any]) -> dict[str, Any]:
        url = f"s3://{BUCKET}/checkpoints"
        return {"name": STORE, "kind": "object", "url": url, "options": options}

    def _configuration(self, memory: str, *tiers: dict[str, Any]) -> dict[str, Any]:
        host = {"name": "host", "kind": "host", "folder": str(self._plan.memory / memory)}
        return {"run": "bench", "max_wait": "10m", "tiers": [host, *tiers]}

    # A slow folder -----------------------------------------------------------------------------------

    def _throttled(self) -> None:
        work = self._workload(self._plan.size_bytes)
        state = {
            name: value.detach().to(torch.bfloat16)
            for name, value in work.model.state_dict().items()
        }
        self._results.facts["throttled_state_bytes"] = bytes_of(list(state.values()))
        del work
        reported: dict[str, float] = {}

        def contender(codec: str) -> Contender:
            folder = self._plan.folder / f"slow-{codec}"
            tier = {
                "name": STORE,
                "kind": "object",
                "url": f"file://{folder}",
                "bandwidth": THROTTLE,
                "compress": {"codec": codec},
            }
            ckpt = tierfall.open(self._configuration(f"slow-{codec}", tier))
            steps = iter(range(1, 1_000_000))

            def timed() -> None:
                ckpt.save(next(steps), state, block=True)

            def after() -> None:
                if codec != "none":
                    reported[codec] = ckpt.statistics().compression[STORE].ratio

            opened.append(ckpt)
            return Contender(name=f"throttled.{codec}", timed=timed, after=after)

        opened: list[tierfall.Checkpointer] = []
        codecs = ("none", "zstd", "planes")
        try:
            self._rounds(
                f"throttled: bf16 weights to a folder at {THROTTLE}, as they are and packed",
                [contender(codec) for codec in codecs],
                most=THROTTLED_ROUNDS,
            )
        finally:
            for ckpt in opened:
                ckpt.close()
        for codec in codecs[1:]:
            self._results.facts[f"{codec}_ratio"] = reported[codec]
            least_gain = 1 + GAIN_TARGET * (reported[codec] - 1)
            self._ratio(
                f"{codec} (ratio {reported[codec]:.2f}), over raw",
                f"throttled.{codec}",
                "throttled.none",
                1 / least_gain,
            )


def _find_image(client: Any, prefix: str) -> tuple[str, int]:
    """Return the key and the size of the image below a prefix."""
    rows = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    return next((row["Key"], row["Size"]) for row in rows if row["Key"].endswith(".safetensors"))


def _put_parts(client: Any, key: str, data: bytes) -> None:
    """Write an object in parts by several threads."""
    place = {"Bucket": BUCKET, "Key": key}
    upload = {**place, "UploadId": client.create_multipart_upload(**place)["UploadId"]}

    def put(number: int) -> dict[str, Any]:
        part = data[(number - 1) * RANGE_BYTES : number * RANGE_BYTES]
        answer = client.upload_part(**upload, PartNumber=number, Body=part)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    with ThreadPoolExecutor(THREADS) as executor:
        parts = list(executor.map(put, range(1, -(-len(data) // RANGE_BYTES) + 1)))
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})


def _read_ranges(client: Any, key: str, size_bytes: int) -> None:
    """Read an object by ranges in several threads; the bytes go nowhere."""

    def read(start: int) -> None:
        span = f"bytes={start}-{min(start + RANGE_BYTES, size_bytes) - 1}"
        client.get_object(Bucket=BUCKET, Key=key, Range=span)["Body"].read()

    with ThreadPoolExecutor(THREADS) as executor:
        for _ in executor.map(read, range(0, size_bytes, RANGE_BYTES)):
            continue


def measure(plan: Plan, say: Callable[[str], None], results: Results) -> None:
    """Measure the parts ``objects`` and ``throttled`` of a plan."""
    Objects(plan, say, results).run()
