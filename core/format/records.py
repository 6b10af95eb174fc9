"""Manifest, commit record, attempt record and mark: what they hold, and how they are read from untrusted bytes.

Each is a document (``documents``). Reading checks every member's type and range, so that no later code has to
doubt them; a member that is missing or wrong is damage (IntegrityError), never a default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierfall.core.types.text import float_to_json
from tierfall.core.types.values import CheckpointId, Shard

if TYPE_CHECKING:
    from tierfall.core.format.documents import Spliced


from tierfall.core.format import documents
from tierfall.core.format.documents import Spliced
from tierfall.core.format.json_fields import JsonFields
from tierfall.core.types import keys
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.lineage import AttemptStart

CHUNK_BYTES_MIN = 4 << 10
CHUNK_BYTES_MAX = 1 << 30
HEADER_BYTES_MAX = 64 << 20
IMAGE_BYTES_MAX = 1 << 50
DIGEST_PREFIX = "xxh3-128:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where a checkpoint stands among the others of its run.

    ``ordinal`` is its place in its line, 1 above the one it continues from; ``started_from`` is the checkpoint that its
    attempt restored before it saved, or None where it began anew. ``at_end``: it is the last of its training, and every
    tier is to get it.
    """

    run: str
    checkpoint: CheckpointId
    attempt_id: str
    ordinal: int
    started_from: CheckpointId | None
    at_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one rank's image holds and how to check it.

    Chunk 0 is the header, bytes 0 to ``data_start``; chunk i > 0 begins at ``data_start + (i - 1) * chunk_bytes``.
    ``digests`` has one ``xxh3-128:`` digest per chunk. ``pieces`` is the serialised table of tensor pieces.
    """

    line: Lineage
    shard: Shard
    image_bytes: int
    data_start: int
    chunk_bytes: int
    digests: tuple[str, ...]
    structure: str
    pieces: Spliced = field(repr=False)

    @property
    def chunk_count(self) -> int:
        return chunk_count(self.image_bytes, self.data_start, self.chunk_bytes)

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Return start and end of chunk ``index`` in the image."""
        return chunk_range(index, self.image_bytes, self.data_start, self.chunk_bytes)

    def encode(self) -> bytes:
        return documents.seal(
            {
                **_lineage_members(self.line),
                "rank": self.shard.rank,
                "world_size": self.shard.world_size,
                "image_bytes": self.image_bytes,
                "data_start": self.data_start,
                "chunk_bytes": self.chunk_bytes,
                "structure": self.structure,
                "chunks": list(self.digests),
                "pieces": self.pieces,
            }
        )


def chunk_count(image_bytes: int, data_start: int, chunk_bytes: int) -> int:
    return 1 + -(-(image_bytes - data_start) // chunk_bytes)


def chunk_range(index: int, image_bytes: int, data_start: int, chunk_bytes: int) -> tuple[int, int]:
    if index == 0:
        return 0, data_start
    start = data_start + (index - 1) * chunk_bytes
    return start, min(start + chunk_bytes, image_bytes)


def read_manifest(data: bytes, *, what: str) -> Manifest:
    """Read a manifest from bytes that nobody vouches for."""
    reader = JsonFields(documents.open_sealed(data, what=what), what)
    world_size = reader.number("world_size", 1, 10**9)
    image_bytes = reader.number("image_bytes", 1, IMAGE_BYTES_MAX)
    data_start = reader.number("data_start", 8, min(image_bytes, HEADER_BYTES_MAX + (1 << 20)))
    chunk_bytes = reader.number("chunk_bytes", CHUNK_BYTES_MIN, CHUNK_BYTES_MAX)
    digests = reader.list_of("chunks", str)
    if len(digests) != chunk_count(image_bytes, data_start, chunk_bytes):
        raise IntegrityError(f"{what}: lists {len(digests)} chunks, its sizes make another number")
    if not all(d.startswith(DIGEST_PREFIX) and len(d) == len(DIGEST_PREFIX) + 32 for d in digests):
        raise IntegrityError(f"{what}: a chunk's digest is not of the form {DIGEST_PREFIX}...")
    pieces = reader.get("pieces", list)
    return Manifest(
        line=_read_lineage(reader),
        shard=Shard(reader.number("rank", 0, world_size - 1), world_size),
        image_bytes=image_bytes,
        data_start=data_start,
        chunk_bytes=chunk_bytes,
        digests=tuple(digests),
        structure=reader.get("structure", str),
        pieces=Spliced(documents.dumps(pieces)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A file that a commit record vouches for: its size, its digest where the manifest does not hold one, and, of a
    packed image, how long it is unpacked."""

    name: str
    bytes: int
    digest: str | None
    raw_bytes: int | None = None

    def members(self) -> dict[str, object]:
        members: dict[str, object] = {"name": self.name, "bytes": self.bytes}
        if self.digest is not None:
            members["digest"] = self.digest
        if self.raw_bytes is not None:
            members["raw_bytes"] = self.raw_bytes
        return members


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The record whose presence makes a checkpoint exist on a tier.

    ``files`` names the image and the manifest of every shard; a manifest with its SHA-256, an image with its size (its
    digests stand in its manifest); and where a tier packs images, the records of their frames with their SHA-256.
    ``metrics`` are rank 0's. ``owed`` names older checkpoints that the tier had not got by then, as they could not be
    written there, and is still to get.
    """

    line: Lineage
    world_size: int
    files: tuple[NamedFile, ...]
    nodes: tuple[str, ...]
    wall_time_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    owed: tuple[CheckpointId, ...] = ()

    @property
    def image_bytes(self) -> int:
        """All images together, unpacked."""
        return sum(file.raw_bytes or file.bytes for file in self.files if file.digest is None)

    @property
    def stored_bytes(self) -> int:
        """All that the record names, as it is stored."""
        return sum(file.bytes for file in self.files)

    def file(self, name: str) -> NamedFile | None:
        return next((file for file in self.files if file.name == name), None)

    def encode(self) -> bytes:
        owed = {"owed": [_checkpoint_members(id) for id in self.owed]} if self.owed else {}
        return documents.seal(
            {
                **_lineage_members(self.line),
                **owed,
                "world_size": self.world_size,
                "wall_time_s": self.wall_time_s,
                "nodes": list(self.nodes),
                "metrics": {k: float_to_json(v) for k, v in self.metrics.items()},
                "tags": list(self.tags),
                "files": [file.members() for file in self.files],
            }
        )


def read_commit(data: bytes, *, what: str) -> Commit:
    """Read a commit record from bytes that nobody vouches for."""
    reader = JsonFields(documents.open_sealed(data, what=what), what)
    metrics = reader.get("metrics", dict)
    if not all(isinstance(v, int | float | str) for v in metrics.values()):
        raise IntegrityError(f"{what}: a metric is not a number")
    files = tuple(_named_file(entry, what) for entry in reader.list_of("files", dict))
    images = [keys.parse_shard(file.name) for file in files if file.digest is None]
    if len({file.name for file in files}) < len(files) or len(set(images)) < len(images):
        raise IntegrityError(f"{what}: names a file twice, or two images of one shard")
    return Commit(
        line=_read_lineage(reader),
        world_size=reader.number("world_size", 1, 10**9),
        files=files,
        nodes=tuple(reader.list_of("nodes", str)),
        wall_time_s=reader.real("wall_time_s"),
        metrics={
            k: reader.parse(f"metrics.{k}", documents.float_from_json, v)
            for k, v in metrics.items()
        },
        tags=tuple(reader.list_of("tags", str)),
        owed=_owed(reader, what),
    )


def _owed(reader: JsonFields, what: str) -> tuple[CheckpointId, ...]:
    """Read what a record need not have."""
    found = reader.list_of("owed", dict) if reader.has("owed") else []
    return tuple(_checkpoint(JsonFields(each, f"{what}: owed")) for each in found)


def _named_file(entry: Mapping[str, Any], what: str) -> NamedFile:
    reader = JsonFields(entry, f"{what}: files")
    file = NamedFile(
        name=reader.name("name"),
        bytes=reader.number("bytes", 0, IMAGE_BYTES_MAX),
        digest=reader.get("digest", str) if "digest" in entry else None,
        raw_bytes=reader.number("raw_bytes", 1, IMAGE_BYTES_MAX) if "raw_bytes" in entry else None,
    )
    packed = keys.is_packed_image(file.name)
    if packed != (file.raw_bytes is not None) or (packed and file.digest is not None):
        raise IntegrityError(
            f"{what}: files: {file.name} is a packed image, or is not: it says both"
        )
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One line of saving: its number, its random 128-bit id in hexadecimal, and who took it when."""

    run: str
    number: int
    id: str
    node: str
    pid: int
    wall_time_s: float

    def encode(self) -> bytes:
        return documents.seal(
            {
                "run": self.run,
                "attempt": self.number,
                "attempt_id": self.id,
                "node": self.node,
                "pid": self.pid,
                "wall_time_s": self.wall_time_s,
            }
        )


def encode_start(run: str, start: AttemptStart) -> bytes:
    """Return the record of how an attempt began. Its name says the same, and is what is read."""
    return documents.seal(
        {
            "run": run,
            "attempt": start.attempt,
            "attempt_id": start.attempt_id,
            "wall_time_s": start.began_s,
            "started_from": _checkpoint_members(start.started_from),
        }
    )


def read_attempt(data: bytes, *, what: str) -> Attempt:
    reader = JsonFields(documents.open_sealed(data, what=what), what)
    return Attempt(
        run=reader.name("run"),
        number=reader.number("attempt", 1, keys.ATTEMPT_MAX),
        id=reader.get("attempt_id", str),
        node=reader.get("node", str),
        pid=reader.number("pid", 0, 1 << 40),
        wall_time_s=reader.real("wall_time_s"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTier:
    """What is remembered of a tier elsewhere: its id (empty where it did not take one), where it was, whether all nodes
    saw its files (None: nobody had to find out), and the number of the device that its folder lay on, which means
    something until the machine restarts."""

    id: str
    place: str
    shared: bool | None
    device: int | None = None

    def members(self) -> dict[str, object]:
        return {"id": self.id, "place": self.place, "shared": self.shared, "device": self.device}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRecord:
    """Which tier of a run this is: its random 128-bit id in hexadecimal; and ``others``, by name, of the same run.
    ``shared`` is as in ``KnownTier``. This machine's memory of a run's tiers has an id of nothing."""

    run: str
    id: str
    shared: bool | None
    wall_time_s: float
    others: Mapping[str, KnownTier] = field(default_factory=dict)

    def encode(self) -> bytes:
        return documents.seal(
            {
                "run": self.run,
                "tier_id": self.id,
                "shared": self.shared,
                "wall_time_s": self.wall_time_s,
                "others": {name: tier.members() for name, tier in self.others.items()},
            }
        )


def read_tier(data: bytes, *, what: str) -> TierRecord:
    """Read a tier's record from bytes that nobody vouches for."""
    members = documents.open_sealed(data, what=what)
    reader = JsonFields(members, what)
    others = reader.get("others", dict)
    return TierRecord(
        run=reader.name("run"),
        id=reader.get("tier_id", str),
        shared=_maybe(reader, members, "shared"),
        wall_time_s=reader.real("wall_time_s"),
        others={name: _known_tier(tier, f"{what}: {name}") for name, tier in others.items()},
    )


def _known_tier(entry: object, what: str) -> KnownTier:
    if not isinstance(entry, dict):
        raise IntegrityError(f"{what}: it is not an object")
    reader = JsonFields(entry, what)
    device = entry.get("device")
    return KnownTier(
        id=reader.get("id", str),
        place=reader.get("place", str),
        shared=_maybe(reader, entry, "shared"),
        device=None if device is None else reader.number("device", 0, 1 << 64),
    )


def _maybe(reader: JsonFields, members: Mapping[str, Any], name: str) -> bool | None:
    """Read what is true, false, or not known."""
    return None if members.get(name) is None else reader.flag(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A note beside a checkpoint: pin, tombstone, tag. ``name`` is also the last part of its key."""

    name: str
    checkpoint: CheckpointId
    wall_time_s: float
    reason: str = ""

    def encode(self) -> bytes:
        return documents.seal(
            {
                "mark": self.name,
                "step": self.checkpoint.step,
                "attempt": self.checkpoint.attempt,
                "wall_time_s": self.wall_time_s,
                "reason": self.reason,
            }
        )


def stops_drop(marks: Collection[str], *, tombstoned: bool) -> bool:
    """Say whether these marks keep a copy from being dropped: a pin does, and a tombstone that whoever drops it did not
    know of (``tombstoned``). That one is for all copies, and goes only with the last."""
    return keys.PIN_MARK in marks or (keys.TOMBSTONE_MARK in marks and not tombstoned)


def read_mark(data: bytes, *, what: str) -> Mark:
    reader = JsonFields(documents.open_sealed(data, what=what), what)
    name = reader.name("mark")
    if not keys.is_ours(f"{keys.MARKS_FOLDER}/{name}"):
        raise IntegrityError(f"{what}: {name!r} is not a mark that tierfall writes")
    return Mark(
        name=name,
        checkpoint=_checkpoint(reader),
        wall_time_s=reader.real("wall_time_s"),
        reason=reader.get("reason", str),
    )


def _lineage_members(line: Lineage) -> dict[str, object]:
    last = {"at_end": True} if line.at_end else {}
    return {
        "run": line.run,
        "step": line.checkpoint.step,
        "attempt": line.checkpoint.attempt,
        "attempt_id": line.attempt_id,
        "ordinal": line.ordinal,
        "started_from": _checkpoint_members(line.started_from),
        **last,
    }


def _checkpoint_members(id: CheckpointId | None) -> dict[str, int] | None:
    return None if id is None else {"step": id.step, "attempt": id.attempt}


def _read_lineage(reader: JsonFields) -> Lineage:
    return Lineage(
        run=reader.name("run"),
        checkpoint=_checkpoint(reader),
        attempt_id=reader.get("attempt_id", str),
        ordinal=reader.number("ordinal", 1, 10**18),
        started_from=reader.optional("started_from", _checkpoint),
        at_end=reader.flag("at_end"),
    )


def _checkpoint(reader: JsonFields) -> CheckpointId:
    return CheckpointId(
        reader.number("step", 0, keys.STEP_MAX), reader.number("attempt", 1, keys.ATTEMPT_MAX)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How an image is cut into chunks."""

    image_bytes: int
    data_start: int
    chunk_bytes: int

    @property
    def chunk_count(self) -> int:
        return chunk_count(self.image_bytes, self.data_start, self.chunk_bytes)

    def chunk_range(self, index: int) -> tuple[int, int]:
        return chunk_range(index, self.image_bytes, self.data_start, self.chunk_bytes)

    def runs(self, bytes_min: int) -> tuple[tuple[int, int], ...]:
        """Put chunks together into runs of at least ``bytes_min`` bytes, but for the last: first chunk, and the one
        after its last."""
        runs: list[tuple[int, int]] = []
        first = 0
        for index in range(self.chunk_count):
            whole = self.chunk_range(index)[1] - self.chunk_range(first)[0] >= bytes_min
            if whole or index == self.chunk_count - 1:
                runs.append((first, index + 1))
                first = index + 1
        return tuple(runs)


def geometry(manifest: Manifest) -> Geometry:
    return Geometry(
        image_bytes=manifest.image_bytes,
        data_start=manifest.data_start,
        chunk_bytes=manifest.chunk_bytes,
    )
