"""What an upload and a download need in memory of their own: no more than what is on its way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from backend_places import retrying

from tests.memory_watch import rise_bytes
from tests.object_store import SeaweedFS
from tierfall.backends.open import open_backend

MIB = 1024 * 1024


def test_an_upload_needs_no_memory_of_its_own(s3_server: SeaweedFS, bucket: str) -> None:
    """80 MiB in parts of 5 MiB, two at once, from one part's memory: less than what is in flight may be added."""
    part_bytes, parallel, total = 5 * MIB, 2, 80 * MIB
    backend = retrying(open_backend(f"s3://{bucket}", options=s3_server.options()))
    source = memoryview(bytearray(b"\x5a" * part_bytes))
    targets = [memoryview(bytearray(part_bytes)) for _ in range(parallel)]
    with ThreadPoolExecutor(parallel) as pool:

        def write() -> None:
            with backend.create("key", length=total) as writer:
                list(pool.map(lambda at: writer.write(at, source), range(0, total, part_bytes)))
                writer.publish()

        def read(index: int) -> None:
            backend.read_into("key", index * part_bytes, targets[index % parallel])

        written_bytes = rise_bytes(write)
        read_bytes = rise_bytes(lambda: list(pool.map(read, range(total // part_bytes))))
    print(f"RssAnon: {written_bytes / MIB:.1f} MiB for writing, {read_bytes / MIB:.1f} for reading")
    assert all(target == source for target in targets)
    assert written_bytes < part_bytes * parallel + 16 * MIB
    assert read_bytes < part_bytes * parallel + 16 * MIB
    backend.close()
