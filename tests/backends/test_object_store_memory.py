"""What an upload and a download need in memory of their own: no more than what is on its way."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from backend_places import retrying

from tests.object_store import SeaweedFS
from tierfall.backends.open import open_backend

MIB = 1024 * 1024


def test_an_upload_needs_no_memory_of_its_own(s3_server: SeaweedFS, bucket: str) -> None:
    """80 MiB in parts of 5 MiB, two at once, from one part's memory: less than what is in flight may be added."""
    part_bytes, parallel, total = 5 * MIB, 2, 80 * MIB
    backend = retrying(open_backend(f"s3://{bucket}", options=s3_server.options()))
    source = memoryview(bytearray(b"\x5a" * part_bytes))
    targets = [memoryview(bytearray(part_bytes)) for _ in range(parallel)]
    with Peak() as peak, ThreadPoolExecutor(parallel) as pool:
        with backend.create("key", length=total) as writer:
            list(pool.map(lambda at: writer.write(at, source), range(0, total, part_bytes)))
            writer.publish()
        written_bytes = peak.grown_bytes
        list(
            pool.map(
                lambda index: backend.read_into(
                    "key", index * part_bytes, targets[index % parallel]
                ),
                range(total // part_bytes),
            )
        )
    print(
        f"RssAnon grew by {written_bytes / MIB:.1f} MiB writing, {peak.grown_bytes / MIB:.1f} both"
    )
    assert all(target == source for target in targets)
    assert written_bytes < part_bytes * parallel + 16 * MIB
    assert peak.grown_bytes < part_bytes * parallel + 24 * MIB
    backend.close()


class Peak:
    """The most that this process's anonymous memory grows by in a block."""

    def __enter__(self) -> Peak:
        self._start_bytes, self._peak_bytes = _anonymous_bytes(), 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *args: Any) -> None:
        self._done.set()
        self._thread.join()

    @property
    def grown_bytes(self) -> int:
        return self._peak_bytes - self._start_bytes

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._peak_bytes = max(self._peak_bytes, _anonymous_bytes())


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
