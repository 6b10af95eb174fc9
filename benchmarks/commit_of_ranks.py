"""What rank 0 computes for the commit of one copy of many ranks: ``python -m benchmarks.commit_of_ranks``.

Every rank says which files it has uploaded; the messages go up the tree of ranks, as in a run, but through memory. The
time is that of rank 0's processor from the last message to the commit record's bytes. The write of the record comes on
top: it is one request.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence

from tests.core.ranks.network import Network
from tierfall.core.flush.commits import files_of_all
from tierfall.core.flush.messages import MessageKind, Messages, UploadedFiles, read_all
from tierfall.core.format.records import Commit, Lineage, NamedFile
from tierfall.core.types import keys
from tierfall.core.types.values import CheckpointId, Shard

ID = CheckpointId(100, 1)
DIGEST = "sha256:" + 64 * "0"


def uploaded(rank: int, ranks: int) -> UploadedFiles:
    """The files of one rank: an image and its manifest."""
    shard = Shard(rank, ranks)
    image = NamedFile(name=keys.shard_name(shard), bytes=1 << 30, digest=None)
    manifest = NamedFile(name=keys.manifest_name(shard), bytes=4096, digest=DIGEST)
    return UploadedFiles(files=(image, manifest))


def commit_s(ranks: int, ranks_of_node: int) -> tuple[float, int]:
    """Return the seconds of rank 0, and the bytes of the record."""
    network = Network([rank // ranks_of_node for rank in range(ranks)])
    root = network.message_trees[0]
    gathered: list[dict[int, object]] = []
    root.on_message = lambda news: gathered.append(news.bodies)  # type: ignore[union-attr]
    arrived: list[tuple[bytes, int]] = []
    receive = root.receive
    root.receive = lambda data, sender: arrived.append((data, sender))  # type: ignore[method-assign]
    for rank, tree in enumerate(network.message_trees):
        Messages(tree).contribute(MessageKind.UPLOADED, ID, "pfs", uploaded(rank, ranks))
    network.deliver()
    for data, sender in arrived[:-1]:
        receive(data, sender)
    gc.collect()
    gc.freeze()  # the other ranks' part of this process is none of rank 0's
    began_s = time.process_time()
    receive(*arrived[-1])
    files = files_of_all(read_all(UploadedFiles, gathered[0]))
    lineage = Lineage(run="run", checkpoint=ID, attempt_id=32 * "0", ordinal=1, started_from=None)
    record = Commit(lineage=lineage, world_size=ranks, files=files, nodes=(), wall_time_s=0.0)
    data = record.encode()
    return time.process_time() - began_s, len(data)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.commit_of_ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--node", type=int, default=8, help="ranks of a node")
    options = parser.parse_args(arguments)
    seconds, size = commit_s(options.ranks, options.node)
    print(f"{options.ranks:,} ranks: {seconds:.2f} s, a record of {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
