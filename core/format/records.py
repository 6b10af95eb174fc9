"""Manifest, commit record, attempt record and record of a tier, and how each is parsed from untrusted bytes.

Each is a document (``documents``). Parsing checks every member's type and range. A wrong member is damage
(IntegrityError), and so is a missing one, but for those that are written only if there is something to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tierfall.core.format import documents
from tierfall.core.format.documents import JsonFields, Spliced
from tierfall.core.types import keys
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.lineage import AttemptStart
from tierfall.core.types.text import members, to_json
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.core.types.view import NodeLosses, SurvivalChance

CHUNK_BYTES_MIN = 4 << 10
CHUNK_BYTES_MAX = 1 << 30
HEADER_BYTES_MAX = 64 << 20
IMAGE_BYTES_MAX = 1 << 50
DIGEST_PREFIX = "xxh3-128:"
METRIC_BYTES = 64
CHUNK_DIGEST_BYTES = 48
RECORD_BYTES = 8192
NOT_FINITE_MAX = 8
NOT_FINITE_CHARACTERS = 128
NOT_FINITE_BYTES = NOT_FINITE_MAX * (6 * NOT_FINITE_CHARACTERS + 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A checkpoint's position among the others of its run.

    ``ordinal`` is 1 above that of the checkpoint before it in its lineage. ``started_from`` is the checkpoint that its
    attempt restored before its first save (None: none). ``at_end``: it is the last of its training; every tier is to
    get it.
    """

    run: str
    checkpoint: CheckpointId
    attempt_id: str
    ordinal: int
    started_from: CheckpointId | None
    at_end: bool = False


def records_bytes_max(
    *, pieces_bytes: int, chunks: int, metrics: Iterable[str], tags: Iterable[str], run: str
) -> int:
    """Return an upper bound of the bytes of an image's manifest and commit record together: what is reserved for them
    beside the image in memory. It is the same for all images of a state, so that one has room where another was."""
    named = sum(6 * len(name) + METRIC_BYTES for name in (*metrics, *tags))
    fixed = RECORD_BYTES + NOT_FINITE_BYTES
    return pieces_bytes + CHUNK_DIGEST_BYTES * chunks + named + 12 * len(run) + fixed


def named_not_finite(names: Iterable[str]) -> tuple[str, ...]:
    """Return what a commit record names as not finite: the first few in the order of names, the last part of each."""
    cut = sorted({name[-NOT_FINITE_CHARACTERS:] for name in names})
    return tuple(cut[:NOT_FINITE_MAX])


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How an image is divided into chunks.

    Chunk 0 is the header, bytes 0 to ``data_start``; chunk i > 0 begins at ``data_start + (i - 1) * chunk_bytes``.
    """

    image_bytes: int
    data_start: int
    chunk_bytes: int

    @property
    def chunk_count(self) -> int:
        return 1 + -(-(self.image_bytes - self.data_start) // self.chunk_bytes)

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Start and end of chunk ``index`` in the image."""
        if index == 0:
            return 0, self.data_start
        start = self.data_start + (index - 1) * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.image_bytes)

    def chunk_ranges(self, bytes_min: int) -> tuple[tuple[int, int], ...]:
        """Group chunks into index ranges (first, end) of at least ``bytes_min`` bytes; the last may be shorter."""
        ranges: list[tuple[int, int]] = []
        first = 0
        for index in range(self.chunk_count):
            enough = self.chunk_range(index)[1] - self.chunk_range(first)[0] >= bytes_min
            if enough or index == self.chunk_count - 1:
                ranges.append((first, index + 1))
                first = index + 1
        return tuple(ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan(Geometry):
    """What is known of an image before it is filled. ``structure`` identifies the structure of the state; ``pieces`` is
    the serialised table of tensor blocks."""

    structure: str
    pieces: Spliced = field(repr=False)

    def geometry(self) -> Geometry:
        """The geometry alone, for owners that do not keep the table."""
        return Geometry(**{each.name: getattr(self, each.name) for each in fields(Geometry)})

    def manifest(self, lineage: Lineage, shard: Shard, digests: Iterable[str]) -> Manifest:
        """Make the manifest of the image, which is filled now."""
        planned = {each.name: getattr(self, each.name) for each in fields(ImagePlan)}
        return Manifest(lineage=lineage, shard=shard, digests=tuple(digests), **planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(ImagePlan):
    """The content and the digests of one rank's image.

    ``digests`` has one ``xxh3-128:`` digest per chunk. ``written`` is the document of a newer version, which is copied
    as it is, since commit records have its digest.
    """

    lineage: Lineage
    shard: Shard
    digests: tuple[str, ...]
    written: bytes = field(default=b"", repr=False, compare=False)

    def encode(self) -> bytes:
        return self.written or documents.seal(
            {
                **_lineage_members(self.lineage),
                "rank": self.shard.rank,
                "world_size": self.shard.world_size,
                **members(self, "image_bytes", "data_start", "chunk_bytes", "structure"),
                "chunks": list(self.digests),
                "pieces": self.pieces,
            }
        )


def parse_manifest(data: bytes, *, what: str) -> Manifest:
    """Parse a manifest from untrusted bytes; ``what`` names it in errors."""
    reader = JsonFields(documents.open_sealed(data, what=what), what)
    world_size = reader.number("world_size", 1, 10**9)
    image_bytes = reader.number("image_bytes", 1, IMAGE_BYTES_MAX)
    data_start = reader.number("data_start", 8, min(image_bytes, HEADER_BYTES_MAX + (1 << 20)))
    chunk_bytes = reader.number("chunk_bytes", CHUNK_BYTES_MIN, CHUNK_BYTES_MAX)
    cut = Geometry(image_bytes=image_bytes, data_start=data_start, chunk_bytes=chunk_bytes)
    digests = reader.list_of("chunks", str)
    if len(digests) != cut.chunk_count:
        raise IntegrityError(f"{what}: lists {len(digests)} chunks, its sizes make another number")
    if not all(d.startswith(DIGEST_PREFIX) and len(d) == len(DIGEST_PREFIX) + 32 for d in digests):
        raise IntegrityError(f"{what}: a chunk's digest is not of the form {DIGEST_PREFIX}...")
    pieces = reader.get("pieces", list)
    manifest = Manifest(
        lineage=_read_lineage(reader),
        shard=Shard(reader.number("rank", 0, world_size - 1), world_size),
        image_bytes=image_bytes,
        data_start=data_start,
        chunk_bytes=chunk_bytes,
        digests=tuple(digests),
        structure=reader.get("structure", str),
        pieces=Spliced(documents.dumps(pieces)),
    )
    return manifest if manifest.encode() == data else replace(manifest, written=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A file in a commit record. ``digest`` is None for an image, ``raw_bytes`` for one that is not packed."""

    name: str
    bytes: int
    digest: str | None
    raw_bytes: int | None = None

    def to_json(self) -> dict[str, object]:
        names = ("name", "bytes", "digest", "raw_bytes")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What was known of a training as of a save, in seconds; None: not known.

    ``began_s``: since 1970, when its first start that saved was opened. ``kept_s``: the time in all its starts that
    made progress which this checkpoint has, without what saves cost. ``step_s``, ``cost_s``: a step, and what a save
    adds to it.
    """

    began_s: float
    kept_s: float | None = None
    step_s: float | None = None
    cost_s: float | None = None

    def ettr(self, wall_time_s: float) -> float | None:
        """The effective training time ratio of the run: ``kept_s / (wall_time_s - began_s)``. That is the productive
        time over the wall-clock time of all its starts together (Meta, HPCA'25, arXiv 2410.21680): saves, restores,
        steps that are lost, and the time between two starts are not productive."""
        wall_s = wall_time_s - self.began_s
        return None if self.kept_s is None or wall_s <= 0 else min(1.0, self.kept_s / wall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The record whose presence makes a checkpoint exist on a tier.

    ``files`` has the image of every shard with its size, the manifests with their SHA-256, and, on a tier that packs
    images, the frame records with their SHA-256. ``metrics`` are rank 0's. ``owed`` names older checkpoints that could
    not be written to the tier until then and are still owed to it. ``not_finite`` names parameters, of any rank, whose
    sample has NaN or an infinity, and ``metrics.NAME`` of such a loss. ``progress`` is rank 0's, if it is known.
    """

    lineage: Lineage
    world_size: int
    files: tuple[NamedFile, ...]
    nodes: tuple[str, ...]
    wall_time_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    owed: tuple[CheckpointId, ...] = ()
    not_finite: tuple[str, ...] = ()
    progress: Progress | None = None

    @property
    def image_bytes(self) -> int:
        """Size of all images together, unpacked."""
        return sum(file.raw_bytes or file.bytes for file in self.files if file.digest is None)

    @property
    def stored_bytes(self) -> int:  # of all named files
        return sum(file.bytes for file in self.files)

    def file(self, name: str) -> NamedFile | None:
        return next((file for file in self.files if file.name == name), None)

    def encode(self) -> bytes:
        known = {} if self.progress is None else asdict(self.progress)
        rare = {
            "owed": to_json(self.owed),
            "not_finite": list(self.not_finite),
            "progress": {name: value for name, value in known.items() if value is not None},
        }
        return documents.seal(
            {
                **_lineage_members(self.lineage),
                **{name: value for name, value in rare.items() if value},
                **members(self, "world_size", "wall_time_s", "nodes", "metrics", "tags"),
                "files": [file.to_json() for file in self.files],
            }
        )


def parse_commit(data: bytes, *, what: str) -> Commit:
    """Parse a commit record from untrusted bytes; ``what`` names it in errors. Leaves out files that this version does
    not write."""
    reader = JsonFields(documents.open_sealed(data, what=what), what)
    metrics = reader.get("metrics", dict)
    if not all(isinstance(v, int | float | str) for v in metrics.values()):
        raise IntegrityError(f"{what}: a metric is not a number")
    named = (_named_file(entry, what) for entry in reader.list_of("files", dict))
    files = tuple(file for file in named if keys.is_tierfall_name(file.name))
    images = [keys.parse_shard(file.name) for file in files if file.digest is None]
    if len({file.name for file in files}) < len(files) or len(set(images)) < len(images):
        raise IntegrityError(f"{what}: names a file twice, or two images of one shard")
    return Commit(
        lineage=_read_lineage(reader),
        world_size=reader.number("world_size", 1, 10**9),
        files=files,
        nodes=tuple(reader.list_of("nodes", str)),
        wall_time_s=reader.real("wall_time_s"),
        metrics={k: reader.parse(f"metrics.{k}", float, v) for k, v in metrics.items()},
        tags=tuple(reader.list_of("tags", str)),
        owed=tuple(
            _checkpoint(JsonFields(each, f"{what}: owed"))
            for each in (reader.list_of("owed", dict) if reader.has("owed") else ())
        ),
        not_finite=named_not_finite(
            reader.list_of("not_finite", str) if reader.has("not_finite") else ()
        ),
        progress=_progress(JsonFields(reader.get("progress", dict), f"{what}: progress"))
        if reader.has("progress")
        else None,
    )


def _progress(reader: JsonFields) -> Progress:
    rare = (f.name for f in fields(Progress) if f.name != "began_s" and reader.has(f.name))
    return Progress(began_s=reader.real("began_s"), **{name: reader.real(name) for name in rare})


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
            f"{what}: files: {file.name} has a name and sizes that disagree about whether it is packed"
        )
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt: its number, its random 128-bit id in hexadecimal, and the process that created it.

    ``node_losses``, with peer memory: the chances that what it saves there survives the loss of nodes.
    """

    run: str
    number: int
    id: str
    node: str
    pid: int
    wall_time_s: float
    node_losses: NodeLosses | None = None

    def encode(self) -> bytes:
        return documents.seal(
            {
                "run": self.run,
                "attempt": self.number,
                "attempt_id": self.id,
                **members(self, "node", "pid", "wall_time_s"),
                **({"node_losses": to_json(self.node_losses)} if self.node_losses else {}),
            }
        )


def encode_start(run: str, start: AttemptStart) -> bytes:
    """Serialise an attempt's start. Readers parse its name, which has the same content."""
    return documents.seal(
        {
            "run": run,
            "attempt": start.attempt,
            "attempt_id": start.attempt_id,
            "wall_time_s": start.began_s,
            "started_from": to_json(start.started_from),
        }
    )


def parse_attempt_record(data: bytes, *, what: str) -> Attempt:
    reader = JsonFields(documents.open_sealed(data, what=what), what)
    return Attempt(
        run=reader.name("run"),
        number=reader.number("attempt", 1, keys.ATTEMPT_MAX),
        id=reader.get("attempt_id", str),
        node=reader.get("node", str),
        pid=reader.number("pid", 0, 1 << 40),
        wall_time_s=reader.real("wall_time_s"),
        node_losses=_node_losses(reader.get("node_losses", dict), what)
        if reader.has("node_losses")
        else None,
    )


def _node_losses(members: dict[str, Any], what: str) -> NodeLosses:
    reader = JsonFields(members, what)

    def chances(name: str) -> tuple[SurvivalChance, ...]:
        return tuple(_chance(entry, what) for entry in reader.list_of(name, dict))

    return NodeLosses(whole=chances("whole"), copies=chances("copies"))


def _chance(members: dict[str, Any], what: str) -> SurvivalChance:
    reader = JsonFields(members, what)
    probability = reader.real("probability")
    if not 0 <= probability <= 1:
        raise IntegrityError(f"{what}: 'probability' is {probability}, not within 0 to 1")
    return SurvivalChance(
        losses=reader.number("losses", 1, 10**9),
        probability=probability,
        exact=reader.flag("exact"),
    )


_OF_MEMORY = ("attempt_id", "file", "kept")
"""Members that only the record of a machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTier:
    """What is recorded of another tier: its id ('' if none could be written to it), its place, and whether all nodes
    saw its files (None: not examined)."""

    id: str
    place: str
    shared: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRecord:
    """The identity of a run's tier: its random 128-bit id in hexadecimal, and the run's ``others``, by name. ``shared``
    is as in ``KnownTier``.

    The record that a machine keeps of a run's tiers, beside its host memory, has an empty id. It also has the id of the
    last attempt that owned that memory, the path of the ``file`` that the run was configured by, and the folder of what
    is ``kept`` for other nodes; each may be ''.
    """

    run: str
    id: str
    shared: bool | None
    wall_time_s: float
    others: Mapping[str, KnownTier] = field(default_factory=dict)
    attempt_id: str = ""
    file: str = ""
    kept: str = ""

    def encode(self) -> bytes:
        return documents.seal(
            {
                "run": self.run,
                "tier_id": self.id,
                "shared": self.shared,
                "wall_time_s": self.wall_time_s,
                "others": {name: asdict(tier) for name, tier in self.others.items()},
                **{name: text for name in _OF_MEMORY if (text := getattr(self, name))},
            }
        )


def parse_tier_record(data: bytes, *, what: str) -> TierRecord:
    """Parse a tier's record from untrusted bytes; ``what`` names it in errors."""
    reader = JsonFields(documents.open_sealed(data, what=what), what)
    others = reader.get("others", dict)
    return TierRecord(
        run=reader.name("run"),
        id=reader.get("tier_id", str),
        shared=reader.flag_or_none("shared"),
        wall_time_s=reader.real("wall_time_s"),
        others={name: _known_tier(tier, f"{what}: {name}") for name, tier in others.items()},
        **{name: reader.get(name, str) for name in _OF_MEMORY if reader.has(name)},
    )


def _known_tier(entry: object, what: str) -> KnownTier:
    if not isinstance(entry, dict):
        raise IntegrityError(f"{what}: it is not an object")
    reader = JsonFields(entry, what)
    return KnownTier(
        id=reader.get("id", str),
        place=reader.get("place", str),
        shared=reader.flag_or_none("shared"),
    )


def _lineage_members(lineage: Lineage) -> dict[str, object]:
    names = ("run", "checkpoint", "attempt_id", "ordinal", "started_from")
    return {**members(lineage, *names), **({"at_end": True} if lineage.at_end else {})}


def _read_lineage(reader: JsonFields) -> Lineage:
    return Lineage(
        run=reader.name("run"),
        checkpoint=_checkpoint(reader),
        attempt_id=reader.get("attempt_id", str),
        ordinal=reader.number("ordinal", 1, 10**18),
        started_from=reader.nullable("started_from", _checkpoint),
        at_end=reader.flag("at_end"),
    )


def _checkpoint(reader: JsonFields) -> CheckpointId:
    return CheckpointId(
        reader.number("step", 0, keys.STEP_MAX), reader.number("attempt", 1, keys.ATTEMPT_MAX)
    )
