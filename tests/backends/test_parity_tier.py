"""A tier whose images are parity in other nodes' memory: what is rebuilt is verified as any copy is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_places import get, put
from parity_nodes import RUN, Cluster, send

import tierfall
from tests.steps import state_of
from tierfall.backends.memory import MemoryBackend
from tierfall.backends.parity.sets import parity_key
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.copies.verify import CopyVerifier
from tierfall.core.types.values import CheckpointId
from tierfall.tiers.stored import StoredTier

FOLDER = f"{RUN}/step-00000001-a0001"
IMAGE = "rank-00000-of-00001.safetensors"
ID = CheckpointId(1, 1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, 3)
    yield made
    made.close()


@pytest.fixture
def documents(cluster: Cluster, saved: Path) -> MemoryBackend:
    """Send the parity of a checkpoint that member 0 has saved, lose the node, and return what member 1 has of it
    beside parity."""
    kept = MemoryBackend()
    own = PosixBackend(saved, direct_io=False)
    views = [cluster.view(0, documents=kept), cluster.view(1), cluster.view(2)]
    for found in own.scan(f"{FOLDER}/"):
        if found.key.endswith(IMAGE):
            send(views[0], found.key, get(own, found.key))
        else:
            put(views[0], found.key, get(own, found.key))
    for member in (1, 2):
        name = f"{FOLDER}/rank-{member:05d}-of-00003.safetensors"
        image = bytes([member]) * 70_000
        send(views[member], name, image)
        cluster.nodes[member].originals.store.put(name, memoryview(image), False)
    cluster.restart(0)
    return kept


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save a step to a tier of files, and return its folder."""
    folder = tmp_path / "saved"
    tiers = [
        {"name": "host", "kind": "host", "folder": str(tmp_path / "memory")},
        {"name": "files", "kind": "file", "path": str(folder)},
    ]
    with tierfall.open({"run": RUN, "chunk": "64KiB", "tiers": tiers}) as ckpt:
        ckpt.save(1, state_of(1)).wait("files")
    return folder


def test_an_image_that_is_rebuilt_is_verified(cluster: Cluster, documents: MemoryBackend) -> None:
    tier = StoredTier(name="peers", run=RUN, backend=cluster.view(1, documents=documents))
    assert [copy.id for copy in tier.list().copies] == [ID]
    with CopyVerifier() as verifier:
        checked = verifier.check_stored(tier, ID)
    assert checked.good, checked


@pytest.mark.parametrize("what", ["parity", "original"])
def test_damage_of_what_an_image_is_rebuilt_from_is_found(
    cluster: Cluster, documents: MemoryBackend, what: str
) -> None:
    """Member 2 has the other data of the first block of member 0, and the parity of the second one."""
    node = cluster.nodes[2]
    if what == "parity":
        place = node.folder / "parity" / parity_key(f"{FOLDER}/00000")
        data = bytearray(place.read_bytes())
        data[10] ^= 1
        place.write_bytes(data)
    else:
        (name,) = node.originals.store.objects
        node.originals.store.put(name, memoryview(b"9" * 70_000), False)
    tier = StoredTier(name="peers", run=RUN, backend=cluster.view(1, documents=documents))
    with CopyVerifier() as verifier:
        checked = verifier.check_stored(tier, ID)
    assert not checked.good
    assert {damage.file for damage in checked.damage} == {IMAGE}
