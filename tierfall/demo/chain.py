"""The demo's chain of tiers: its configuration file, the checkpoints on it, and how to damage them.

It inspects tiers with ``tierfall.ops.reader``, as ``tierfall ls`` does.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tierfall.config import Config, load_config
from tierfall.core.format.catalog import Listing, merge
from tierfall.core.types import keys
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.demo.training import Plan
from tierfall.ops.commands import view_of
from tierfall.ops.reader import RunReader

HOST, FAST, STORE = "host", "fast", "store"
TIERS = (HOST, FAST, STORE)
RUN = "demo"
SHARED_MEMORY = Path("/dev/shm")
ROOM_IN_IMAGES = 3
"""Host memory needs 2.2 images; with less room than this in /dev/shm, a folder on disk is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A place in an object store: its address, and what the configuration calls its options."""

    url: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Where the demo keeps its things. ``memory`` is the folder of the host tier's arena."""

    folder: Path
    memory: Path
    config_path: Path
    config: Config

    @property
    def events(self) -> Path:
        """The event log of the run."""
        return _events(self.folder)

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def remove_memory(self) -> None:
        shutil.rmtree(self.memory, ignore_errors=True)


def write_chain(
    folder: Path, plan: Plan, *, every: int, image_bytes: int, bucket: Bucket | None = None
) -> Chain:
    """Write ``tiers.yaml`` into ``folder``, and make the folder for logs.

    The object tier is ``bucket``, or without one a folder, called by its address. Raises ConfigError where ``folder``
    has a name that an address cannot have.
    """
    memory, path = _memory(folder, image_bytes), folder / "tiers.yaml"
    path.write_text(
        f"run: {RUN}\n"
        f"interval: {{every: {every}}}\n"
        f"chunk: {plan.chunk}\n"
        f"events: {_quoted(_events(folder))}\n"
        "tiers:\n"
        f"  - {{name: {HOST}, kind: host, folder: {_quoted(memory)}}}\n"
        f"  - {{name: {FAST}, kind: file, path: {_quoted(folder / FAST)}, retain: {{last: 2}}}}\n"
        f"  - name: {STORE}\n"
        "    kind: object\n"
        f"{_address(folder, bucket)}"
        "    flush: {every: 2}\n"
        "    retain: {last: 2}\n"
        "    compress: {codec: planes}\n"
        f"    bandwidth: {plan.store_bandwidth}\n"
    )
    chain = Chain(folder=folder, memory=memory, config_path=path, config=load_config(path))
    chain.logs.mkdir()
    return chain


def _events(folder: Path) -> Path:
    return folder / "events.jsonl"


def _address(folder: Path, bucket: Bucket | None) -> str:
    if bucket is None:
        return f"    url: {json.dumps(f'file://{folder / STORE}')}\n    shared: true\n"
    lines = yaml.safe_dump(
        {"url": bucket.url, "options": dict(bucket.options)}, sort_keys=False
    ).splitlines()
    return "".join(f"    {line}\n" for line in lines)


def _quoted(path: Path) -> str:
    """A string of JSON is one of YAML too, whatever is in it."""
    return json.dumps(str(path))


def _memory(folder: Path, image_bytes: int) -> Path:
    if SHARED_MEMORY.is_dir() and (
        shutil.disk_usage(SHARED_MEMORY).free > ROOM_IN_IMAGES * image_bytes
    ):
        return SHARED_MEMORY / f"tierfall-demo-{secrets.token_hex(4)}"
    return folder / "memory"


def list_tiers(chain: Chain) -> dict[str, Listing]:
    """List what each tier holds, from outside; the tiers' names in the chain's order."""
    with RunReader(chain.config) as reader:
        return {listing.tier: listing for listing in reader.list()}


def still_owed(chain: Chain, listings: Mapping[str, Listing]) -> set[tuple[CheckpointId, str]]:
    """Name the copies that the next start is to finish, each by its checkpoint and tier."""
    view = view_of(chain.config, merge(listings.values()))
    return {(checkpoint.id, tier) for checkpoint in view.checkpoints for tier in checkpoint.owed}


def delete_node_storage(chain: Chain) -> None:
    """Remove all that is on this node: host memory, and the file tier's folder.

    Raises OSError where something of it stays.
    """
    for folder in (chain.memory, chain.folder / FAST):
        shutil.rmtree(folder)


def flip_byte(chain: Chain, tier: str, checkpoint: CheckpointId) -> tuple[Path, int]:
    """Flip all bits of the byte in the middle of a shard; return its path and the byte's offset."""
    folder = chain.folder / tier / RUN / keys.step_folder(checkpoint)
    path = folder / keys.shard_name(Shard(0, 1))
    offset = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 0xFF]))
    return path, offset
