"""What the doomed trainers save, where they save it, and where they can be stopped: no pytest, no checks.

Every tensor of a step is a pure function of (start, step), so whoever finds a checkpoint can say what it must hold.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.distributed import killing
from tierfall.backends.posix.backend import PosixBackend, PosixWriter
from tierfall.backends.posix.folders import Folders
from tierfall.core.capture.copier import ImageCopier
from tierfall.core.flush.coordinator import Coordinator
from tierfall.core.flush.memory import Admissions
from tierfall.setup.opened_tiers import OpenedTiers
from tierfall.tiers.host import HostTier
from tierfall.tiers.image_file import ImageFile, Region
from tierfall.tiers.run_files import Fence
from tierfall.tiers.stored import StoredTier

RUN = "doomed"
KEEP = 2
SLOW_EVERY = 2
CHUNK_BYTES = 64 << 10

_SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "big": (torch.float32, (250, 501)),
    "half": (torch.bfloat16, (37_501,)),
    "odd": (torch.uint8, (25_003,)),
    "empty": (torch.float32, (0, 4)),
}


def config(folder: Path, memory: Path, when_full: str) -> dict[str, Any]:
    """Three images in memory, a fast folder, and a slow one that packs, and takes every second; with ``supersede`` the
    fast one is too slow for a save every step, so that most are given up on their way."""
    hurried = {"bandwidth": "6MB/s"} if when_full == "supersede" else {}
    return {
        "run": RUN,
        "chunk": CHUNK_BYTES,
        "max_wait": "20s",
        "tiers": [
            {
                "name": "host",
                "kind": "host",
                "folder": str(memory),
                "capacity": "2304KiB",
                "when_full": when_full,
            },
            {
                "name": "nvme",
                "kind": "file",
                "path": str(folder / "nvme"),
                "retain": {"last": KEEP},
                **hurried,
            },
            {
                "name": "slow",
                "kind": "file",
                "path": str(folder / "slow"),
                "flush": {"every": SLOW_EVERY},
                "retain": {"last": KEEP},
                "bandwidth": "15MB/s",
                "compress": {"codec": "zstd"},
            },
        ],
    }


@functools.lru_cache(maxsize=32)
def tensors_of(start: int, step: int) -> Mapping[str, torch.Tensor]:
    """What start number ``start`` saves as ``step``, any bit pattern being as likely as any other."""
    made = {"who": torch.tensor([start, step])}
    for number, (name, (dtype, shape)) in enumerate(_SHAPES.items()):
        source = torch.Generator().manual_seed((start * 100_000 + step) * 10 + number)
        count = torch.empty(shape, dtype=dtype).nbytes
        data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=source)
        made[name] = data.view(dtype).reshape(shape)
    return made


def blank_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in _SHAPES.items()
    }
    return {"who": torch.zeros(2, dtype=torch.int64), **state, "extra": {"step": -1}}


def fill_state(state: dict[str, Any], start: int, step: int) -> None:
    for name, tensor in tensors_of(start, step).items():
        state[name].copy_(tensor)
    state["extra"]["step"] = step


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: floats that are not numbers compare too."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def difference(found: Mapping[str, Any], start: int, step: int) -> str | None:
    """Say which tensor is not, bit for bit, what that start saved as that step; None where all are."""
    for name, expected in tensors_of(start, step).items():
        tensor = found.get(name)
        if tensor is None or tensor.dtype != expected.dtype or tensor.shape != expected.shape:
            return f"{name} is missing, or of another dtype or shape"
        if not torch.equal(raw(tensor), raw(expected)):
            return f"{name} differs in {int((raw(tensor) != raw(expected)).sum())} bytes"
    return None


# Where a trainer can be stopped ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """A call that a trainer stops at, before or after it is made; ``fits`` looks at its arguments."""

    owner: Any
    method: str
    fits: Callable[..., bool] = lambda *args, **more: True
    calls: tuple[int, int] = (1, 1)
    after: bool = False


before = Point
after = functools.partial(Point, after=True)


def _writes(tier: str, ending: str) -> Callable[..., bool]:
    def fits(writer: PosixWriter, *args: object, **more: object) -> bool:
        there = writer._backend.folders.path.name == tier
        return there and "/step-" in writer._key and writer._key.endswith(ending)

    return fits


def _on(tier: str) -> Callable[..., bool]:
    return lambda store, *args, **more: store.name == tier


def _of_fence_on(tier: str) -> Callable[..., bool]:
    return lambda fence, *args, **more: fence._tier == tier


def _was_unsealed(region: Region) -> bool:
    return region.is_discarded


def _deletes(tier: str, ending: str) -> Callable[..., bool]:
    def fits(backend: PosixBackend, key: str) -> bool:
        return backend.place.endswith(f"/{tier}") and "/step-" in key and key.endswith(ending)

    return fits


def _unlinks(tier: str, ending: str) -> Callable[..., bool]:
    """One file of those that go together, before their folder is synced."""
    return lambda backend, folder, key: _deletes(tier, ending)(backend, key)


def _deletes_some(tier: str, ending: str) -> Callable[..., bool]:
    return lambda backend, keys: any(_deletes(tier, ending)(backend, key) for key in keys)


_IMAGE, _PACKED = ".safetensors", ".safetensors.zst"
_MANIFEST, _COMMIT = "-00001.json", "/commit.json"

CAPTURE = {
    "capture-copy": before(ImageCopier, "copy_next", calls=(2, 60)),
    "capture-copied": after(ImageCopier, "copy_next", calls=(2, 60)),
    "capture-hash": before(ImageCopier, "hash_ready", calls=(2, 60)),
    "capture-room": after(HostTier, "allocate", calls=(1, 6)),
    "capture-unsealed": before(Region, "seal", calls=(1, 5)),
    "capture-sealed": after(Region, "seal", calls=(1, 5)),
}
FLUSH = {
    "flush-open": before(StoredTier, "create_shard", _on("nvme"), calls=(1, 5)),
    "flush-nvme": after(PosixWriter, "write", _writes("nvme", _IMAGE), calls=(2, 50)),
    "flush-slow": after(PosixWriter, "write", _writes("slow", _PACKED), calls=(2, 25)),
    "flush-synced": after(PosixWriter, "_sync_and_close", _writes("slow", _PACKED)),
    "flush-published": after(PosixWriter, "publish", _writes("nvme", _IMAGE), calls=(1, 5)),
}
COMMIT = {
    "commit-manifest": after(StoredTier, "write_manifest", _on("nvme"), calls=(1, 5)),
    "commit-fenced": after(Fence, "check", _of_fence_on("slow"), calls=(1, 2)),
    "commit-written": after(PosixWriter, "write", _writes("nvme", _COMMIT), calls=(1, 5)),
    "commit-synced": after(PosixWriter, "_sync_and_close", _writes("nvme", _COMMIT), calls=(1, 5)),
    "commit-linked": after(
        os, "link", lambda source, target, **more: target == "commit.json", calls=(1, 5)
    ),
    "commit-done": after(StoredTier, "commit", _on("nvme"), calls=(1, 5)),
    "commit-first": after(StoredTier, "commit", _on("nvme")),
    "commit-latest": after(StoredTier, "write_latest", _on("slow"), calls=(1, 3)),
}
PRUNE = {
    "prune-begin": before(StoredTier, "delete", _on("nvme"), calls=(1, 3)),
    "prune-commit": before(PosixBackend, "delete", _deletes("nvme", _COMMIT), calls=(1, 3)),
    "prune-uncommitted": after(PosixBackend, "delete", _deletes("nvme", _COMMIT), calls=(1, 3)),
    "prune-manifest": after(PosixBackend, "_unlink", _unlinks("nvme", _MANIFEST), calls=(1, 3)),
    "prune-image": after(PosixBackend, "_unlink", _unlinks("nvme", _IMAGE), calls=(1, 3)),
    "prune-synced": after(PosixBackend, "delete_some", _deletes_some("nvme", _IMAGE), calls=(1, 3)),
    "prune-emptied": before(
        Folders,
        "remove_empty",
        lambda folders, folder: folders.path.name == "nvme" and "/step-" in folder,
        calls=(2, 2),
    ),
    "prune-slow": after(PosixBackend, "delete", _deletes("slow", _COMMIT)),
}
ADOPTION = {
    "adopt-attached": after(ImageFile, "_adopt"),
    "adopt-attempt": before(OpenedTiers, "claim_from"),
    "adopt-took": after(Fence, "create", _of_fence_on("slow")),
    "adopt-started": after(Coordinator, "start"),
    "adopt-collect": after(StoredTier, "discard_unfinished"),
    "adopt-flush": after(PosixWriter, "write", _writes("slow", _PACKED), calls=(1, 10)),
    "adopt-manifest": after(StoredTier, "write_manifest", _on("slow")),
    "adopt-commit": after(StoredTier, "commit", _on("slow")),
}
SUPERSEDE = {
    "supersede-begin": before(Admissions, "_give_up", calls=(1, 4)),
    "supersede-sealed": before(Region, "unseal", calls=(1, 4)),
    "supersede-unsealed": after(Region, "unseal", calls=(1, 4)),
    "supersede-told": after(Admissions, "_give_up", calls=(1, 4)),
    "supersede-release": before(Region, "release", _was_unsealed, calls=(1, 4)),
    "supersede-free": after(Admissions, "free", calls=(2, 5)),
}
POINTS = {**CAPTURE, **FLUSH, **COMMIT, **PRUNE, **ADOPTION, **SUPERSEDE}


def stop_at(name: str, call: int, tell: Callable[[], None]) -> None:
    """Let this process tell, and stand still for ever, at the ``call``-th call that fits a point."""
    point = POINTS[name]

    def stop() -> None:
        tell()
        threading.Event().wait()

    killing.at(point.owner, point.method, call, stop, after=point.after, fits=point.fits)
