"""The demo's chain of tiers: the file that describes it, what lies on it, and how to damage it.

It looks from outside, through ``tierfall.reading``, as ``tierfall ls`` does.
"""

from __future__ import annotations

import json
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from tierfall.config import Config, load_config
from tierfall.core import names
from tierfall.core.catalog import Listing, merge, to_view
from tierfall.core.values import CheckpointId, Shard
from tierfall.demo.training import Plan
from tierfall.policies import flush
from tierfall.reading import Reader
from tierfall.session import tier_rules

HOST, FAST, SLOW = "host", "fast", "slow"
TIERS = (HOST, FAST, SLOW)
RUN = "demo"
SHARED_MEMORY = Path("/dev/shm")
ROOM_IN_IMAGES = 3
"""Host memory takes 2.2 images; with less room than this in /dev/shm, a folder on disk does as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Where the demo keeps its things. ``memory`` is the folder of the host tier's arena."""

    folder: Path
    memory: Path
    config_path: Path

    @property
    def config(self) -> Config:
        return load_config(self.config_path)

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def remove_memory(self) -> None:
        shutil.rmtree(self.memory, ignore_errors=True)


def write_chain(folder: Path, plan: Plan, *, every: int, image_bytes: int) -> Chain:
    """Write ``tiers.yaml`` into ``folder``, and make the folder for logs."""
    chain = Chain(
        folder=folder, memory=_memory(folder, image_bytes), config_path=folder / "tiers.yaml"
    )
    chain.config_path.write_text(
        f"run: {RUN}\n"
        f"interval: {{every: {every}}}\n"
        f"chunk: {plan.chunk}\n"
        "tiers:\n"
        f"  - {{name: {HOST}, kind: host, folder: {_quoted(chain.memory)}}}\n"
        f"  - {{name: {FAST}, kind: file, path: {_quoted(folder / FAST)}, retain: {{last: 2}}}}\n"
        f"  - name: {SLOW}\n"
        "    kind: file\n"
        f"    path: {_quoted(folder / SLOW)}\n"
        "    flush: {every: 2}\n"
        f"    bandwidth: {plan.slow_bandwidth}\n"
    )
    chain.logs.mkdir()
    return chain


def _quoted(path: Path) -> str:
    """A string of JSON is one of YAML too, whatever is in it."""
    return json.dumps(str(path))


def _memory(folder: Path, image_bytes: int) -> Path:
    if SHARED_MEMORY.is_dir() and (
        shutil.disk_usage(SHARED_MEMORY).free > ROOM_IN_IMAGES * image_bytes
    ):
        return SHARED_MEMORY / f"tierfall-demo-{secrets.token_hex(4)}"
    return folder / "memory"


def look(chain: Chain) -> dict[str, Listing]:
    """List what each tier holds, from outside; the tiers' names in the chain's order."""
    with Reader(chain.config) as reader:
        return {listing.tier: listing for listing in reader.list()}


def still_owed(chain: Chain, listings: dict[str, Listing]) -> set[tuple[str, str]]:
    """Name the copies, as (``step@attempt``, tier), that the next start is to finish."""
    view = to_view(tier_rules(chain.config), merge(listings.values()))
    return {
        (str(checkpoint.id), tier)
        for checkpoint in view.checkpoints
        for tier in flush.still_owed(view, checkpoint)
    }


def half_there(chain: Chain, tier: str, checkpoint: CheckpointId) -> bool:
    """Say whether bytes of a checkpoint lie on a file tier, and no commit record."""
    folder = chain.folder / tier / RUN / names.step_folder(checkpoint)
    files = {path.name for path in folder.glob("*")} | {path.name for path in folder.glob(".*")}
    return bool(files) and names.COMMIT_NAME not in files


def parse_checkpoint(text: str) -> CheckpointId:
    """Read ``step@attempt``."""
    step, _, attempt = text.partition("@")
    return CheckpointId(int(step), int(attempt))


def flip_byte(chain: Chain, tier: str, checkpoint: CheckpointId) -> tuple[Path, int]:
    """Flip all bits of the byte in the middle of a shard; return its path and the byte's offset."""
    folder = chain.folder / tier / RUN / names.step_folder(checkpoint)
    path = folder / names.shard_name(Shard(0, 1))
    offset = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 0xFF]))
    return path, offset
