"""The model of the YAML file: its first level, and the tiers, one class for each kind.

The model contains numbers and absolute paths; it opens nothing. Single values are checked in ``fields``. The chain of
tiers is checked as a whole: which kinds, in which order, and no duplicates.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from tierfall.config.fields import (
    Bandwidth,
    Chunk,
    Count,
    Flag,
    Folder,
    Interface,
    Name,
    Rate,
    Size,
    Url,
    Wait,
    any_word,
    choice,
    is_address,
    no_address,
    parsed,
    show,
    value_error,
)
from tierfall.config.plugins import load_module
from tierfall.config.sections import (
    CaptureSection,
    CompressSection,
    DrainSection,
    EventsSection,
    EvictSection,
    FlushSection,
    IntervalSection,
    MetricsSection,
    OnClose,
    RetainSection,
    Section,
    expand_events,
)
from tierfall.config.source import Problem, write_place
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import with_article
from tierfall.core.types.values import Driver, OnError, TierKind, WhenFull
from tierfall.tiers.host_folder import default_folder

FOLDER = "file://"
PEER_FOLDER = ".peers"
"""No run has such a name."""
NODE_SPREAD = "node"


class _Tier(Section):
    name: Name = Field(
        description="The name of the tier in commands, reports and messages.", examples=["nvme"]
    )


class DeviceTierConfig(_Tier):
    """Spare memory of the GPU, per rank, for tensors that a step would wait for. It stores no checkpoint."""

    kind: Literal[TierKind.DEVICE] = Field(
        description="device: spare memory of the GPU. Without a GPU the tier is omitted, with a warning."
    )
    capacity_bytes: Size = Field(
        alias="capacity",
        description="How much to allocate at the first save, per rank.",
        examples=["4GiB"],
    )


class HostTierConfig(_Tier):
    """Memory of the host, page-locked where there is a device; each rank has its own."""

    kind: Literal[TierKind.HOST] = Field(
        description="host: memory of the host. There is exactly one such tier."
    )
    capacity_bytes: Size | None = Field(
        default=None,
        alias="capacity",
        description="How much to take, per rank; absent: two images, with a peer tier three, and one more if saves "
        "wait and there is room; the ranks of a node together at most three quarters of the free memory, with a peer "
        "tier half of it.",
        examples=["16GiB"],
    )
    when_full: Annotated[WhenFull, choice(WhenFull), any_word(WhenFull)] = Field(
        default=WhenFull.WAIT,
        description="What a save does when there is no room. wait: it waits, up to max_wait, and is skipped then. "
        "skip: it is skipped at once. supersede: it replaces the oldest snapshot that no stored tier has, or is "
        "copying, if that one is not needed; else it waits.",
        examples=["supersede"],
    )
    folder: Annotated[Folder, no_address("a folder of the machine")] | None = Field(
        default=None,
        description="The folder of the memory's files; absent: a folder of the user's own in /dev/shm, or in "
        "the temporary folder if there is no /dev/shm.",
        examples=["/dev/shm/checkpoints"],
    )
    on_close: Annotated[OnClose, choice(OnClose), any_word(OnClose)] = Field(
        default=OnClose.RELEASE,
        description="release: a clean close frees the memory, once all is durable below. keep: the images remain "
        "in memory for the next start.",
        examples=["keep"],
    )


_KEYS_OF_WRITING = frozenset(
    {
        "bandwidth",
        "capacity_bytes",
        "compress",
        "evict",
        "flush",
        "max_wait_s",
        "retain",
        "when_full",
    }
)
"""Keys that apply only to a tier that is written to."""


class StoredTierConfig(_Tier):
    """A tier that stores checkpoints in files or objects."""

    read_only: Flag = Field(
        default=False,
        description="Whether the tier is only restored from: nothing is flushed to it, and nothing there is changed or "
        "deleted.",
        examples=[True],
    )
    shared: Flag | None = Field(
        default=None,
        description="Whether all nodes see the same files; absent: an object store is shared, and for a folder open "
        "finds out if there are several nodes. A tier that is not shared does not survive the loss of a node.",
        examples=[True],
    )
    capacity_bytes: Size | None = Field(
        default=None,
        alias="capacity",
        description="The most that tierfall may store there; per node if it is not shared; absent: what "
        "the medium has.",
        examples=["500GiB"],
    )
    flush: FlushSection = Field(
        default=FlushSection(),
        description="Which checkpoints the tier receives.",
        examples=[{"every": 1}],
    )
    retain: RetainSection = Field(
        default=RetainSection(), description="Which checkpoints it keeps.", examples=[{"last": 3}]
    )
    evict: EvictSection = Field(
        default=EvictSection(),
        description="What it deletes if its capacity is short.",
        examples=[{"order": "oldest"}],
    )
    compress: CompressSection = Field(
        default=CompressSection(),
        description="How chunks are compressed there.",
        examples=[{"codec": "none"}],
    )
    bandwidth: Bandwidth | None = Field(
        default=None,
        description="The most that may be written there per second, by one rank: a rate, or a share of how fast the "
        "tier was measured to be; absent: no limit.",
        examples=["500MB/s", "50%"],
    )
    read_bandwidth: Rate | None = Field(
        default=None,
        description="The most that may be read from there per second, by one rank: by restores, load, verify, export, "
        "and flushes to other tiers; absent: no limit.",
        examples=["2GB/s"],
    )
    when_full: Annotated[WhenFull, choice(WhenFull), any_word(WhenFull)] | None = Field(
        default=None,
        description="What happens to checkpoints that this tier is owed, if it is behind and the tiers above are full "
        "of them. wait: saves wait. skip: the newest that is not being copied is given up. supersede: the oldest is. "
        "None is given up that is needed. Absent: supersede if the host tier has it, else wait.",
        examples=["supersede"],
    )
    max_wait_s: Wait | None = Field(
        default=None,
        alias="max_wait",
        description="The most that a save may wait for this tier, in place of the run's max_wait; and how long it may "
        "fail before that is reported.",
        examples=["10s"],
    )

    @property
    def bandwidth_bytes_per_s(self) -> int | None:
        """The most that may be written there per second, where it is set as a rate."""
        return self.bandwidth if isinstance(self.bandwidth, int) else None

    @property
    def bandwidth_share(self) -> float | None:
        """The share of its measured rate that may be written there, where it is set as one."""
        return self.bandwidth if isinstance(self.bandwidth, float) else None

    @model_validator(mode="after")
    def _read_only_has_no_keys_of_writing(self) -> Self:
        given = sorted(_KEYS_OF_WRITING & self.model_fields_set)
        if self.read_only and given:
            words = ", ".join(type(self).model_fields[name].alias or name for name in given)
            raise value_error(
                f"read_only: true, and {words}: nothing is written to a tier that is only restored from; remove one of "
                "them",
                expected="read_only alone, or the rules of a tier that is written to",
            )
        return self

    @model_validator(mode="after")
    def _watermarks_have_a_capacity(self) -> Self:
        if self.evict.high is not None and self.capacity_bytes is None:
            raise value_error(
                "evict.high is a share of the tier's capacity, which is not set; expected one such as capacity: 500GiB",
                expected="a capacity beside evict.high, such as 500GiB",
            )
        return self


_EXPECTED_FOLDER = 'a folder such as ./checkpoints; a tier at an address is {name: store, kind: object, url: "s3://bucket/prefix"}'


class FileTierConfig(StoredTierConfig):
    """A folder: a local disk, or a parallel file system."""

    kind: Literal[TierKind.FILE] = Field(description="file: a folder.")
    path: Annotated[Folder, no_address(_EXPECTED_FOLDER)] = Field(
        description="The folder; ~ is the home folder, and a relative path starts at the folder of the YAML file, "
        "in a dict at the working directory.",
        examples=["./checkpoints"],
    )

    @property
    def folder(self) -> Path:
        return self.path

    @property
    def place(self) -> str:
        """Identifies it among other places."""
        return os.path.realpath(self.path)


def _only_every(section: FlushSection) -> FlushSection:
    """Refuse keys of ``flush`` that a peer tier does not have."""
    others = sorted(section.model_fields_set - {"every"})
    if others:
        names = ", ".join(FlushSection.model_fields[name].alias or name for name in others)
        raise value_error(
            f"a peer tier accepts flush.every only: remove {names}. Images are sent in the order of their saves, and "
            "more slowly while that slows training",
            expected="every only, such as {every: 1}",
        )
    return section


class PeerTierConfig(FileTierConfig):
    """Memory of other nodes: each node keeps the images of others. With one node the tier is left out."""

    kind: Literal[TierKind.PEER] = Field(  # type: ignore[assignment]
        description="peer: the memory of other nodes. There is one such tier at most."
    )
    path: Annotated[Folder, no_address("a folder of the machine")] = Field(
        default_factory=lambda: default_folder() / PEER_FOLDER,
        description="The folder of the images that this node keeps for others; absent: one in the folder of the "
        "host tier's default.",
        examples=["/dev/shm/peers"],
    )
    copies: Count = Field(
        default=1,
        description="How many other nodes keep each image. There must be more nodes than that.",
        examples=[2],
    )
    spread: Name = Field(
        default=NODE_SPREAD,
        description="What no two copies of an image share, its own node's included. node: the node. Another word, such "
        "as rack, names failure domains: of each node by the variable TIERFALL_DOMAIN, or by domains, or by Slurm.",
        examples=["rack"],
    )
    domains: Annotated[Folder, no_address("a file")] | None = Field(
        default=None,
        description="A file with the failure domain of each node, in lines 'HOSTNAME DOMAIN'; absent: none.",
        examples=["./racks.txt"],
    )
    interface: Interface | None = Field(
        default=None,
        description="The network that carries the images: the name of an interface of each node, or a subnet such as "
        "10.1.0.0/16; absent: the one that leads to rank 0.",
        examples=["ib0"],
    )
    flush: Annotated[FlushSection, AfterValidator(_only_every)] = Field(
        default=FlushSection(),
        description="Which checkpoints are sent: every alone.",
        examples=[{"every": 1}],
    )
    # What is kept is one rule: the newest checkpoint that is whole, and the one that arrives.
    shared: ClassVar[bool] = False  # type: ignore[misc]
    read_only: ClassVar[bool] = False  # type: ignore[misc]
    capacity_bytes: ClassVar[None] = None  # type: ignore[misc]
    retain: ClassVar[RetainSection] = RetainSection(last=1)  # type: ignore[misc]
    evict: ClassVar[EvictSection] = EvictSection()  # type: ignore[misc]
    compress: ClassVar[CompressSection] = CompressSection()  # type: ignore[misc]
    read_bandwidth: ClassVar[None] = None  # type: ignore[misc]
    when_full: ClassVar[None] = None  # type: ignore[misc]

    @property
    def bandwidth_bytes_per_s(self) -> int | None:
        """The most of an image that may be sent per second: each byte is sent to every node that keeps a copy."""
        limit = super().bandwidth_bytes_per_s
        return None if limit is None else max(1, limit // self.copies)


_NO_DRIVER = {
    "obstore": "; remove driver: gs:// and az:// are accessed by fsspec (gcsfs, adlfs), s3:// by tierfall's own client"
}
"""The driver that tierfall had once."""


class ObjectTierConfig(StoredTierConfig):
    """An object store, or any address that fsspec supports."""

    kind: Literal[TierKind.OBJECT] = Field(description="object: an object store, by its address.")
    url: Url = Field(
        description="Its address: s3://bucket/prefix, gs://, az://, file:///folder, or another of fsspec's.",
        examples=["s3://bucket/checkpoints"],
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="fsspec's storage options: endpoint_url, key, secret. Never shown.",
        examples=[{"endpoint_url": "${env:S3_ENDPOINT}"}],
    )
    driver: Annotated[Driver, choice(Driver, instead=_NO_DRIVER), any_word(Driver)] | None = Field(
        default=None,
        description="fsspec: its library accesses s3:// and file://, too, in place of tierfall's own clients.",
        examples=["fsspec"],
    )

    @property
    def folder(self) -> Path | None:
        """Its folder, if the address is of a folder."""
        return Path(self.url.removeprefix(FOLDER)) if self.url.startswith(FOLDER) else None

    @property
    def place(self) -> str:
        """Identifies it among other places."""
        return self.url.rstrip("/") if self.folder is None else os.path.realpath(self.folder)


Tier = Annotated[
    DeviceTierConfig | HostTierConfig | PeerTierConfig | FileTierConfig | ObjectTierConfig,
    Field(discriminator="kind"),
]
TIER_MODELS: dict[str, type[_Tier]] = {
    TierKind.DEVICE: DeviceTierConfig,
    TierKind.HOST: HostTierConfig,
    TierKind.PEER: PeerTierConfig,
    TierKind.FILE: FileTierConfig,
    TierKind.OBJECT: ObjectTierConfig,
}


# The chain -------------------------------------------------------------------------------------------
#
# The checks read links, the few properties of a tier that matter here: so they work on a configuration with errors
# elsewhere, too. Messages name places, never values: a value may be from the environment.


_RANKS = {TierKind.DEVICE: 0, TierKind.HOST: 1}
"""Their order in the chain; stored tiers come after them, as the user orders them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The properties of one tier; None where missing or invalid. ``unshared``: the file has ``shared: false``."""

    name: str | None = None
    kind: TierKind | None = None
    folder: str | None = None
    url: str | None = None
    unshared: bool = False


def link_of(tier: object, base: Path | None = None) -> Link:
    """Return the link of a tier as YAML yields it, valid or not; a relative path starts at ``base``."""
    if not isinstance(tier, Mapping):
        return Link()
    name, kind, path, url = (tier.get(key) for key in ("name", "kind", "path", "url"))
    endpoint = _endpoint(tier.get("options"))
    folder = None
    if isinstance(path, str | os.PathLike) and path:
        folder = os.path.join(base or "", os.path.expanduser(path))
    if isinstance(url, str) and url.startswith(FOLDER):
        folder, url = url.removeprefix(FOLDER), None
    return Link(
        name=name if isinstance(name, str) else None,
        kind=TierKind(kind) if isinstance(kind, str) and kind in set(TierKind) else None,
        folder=str(folder) if folder else None,
        url=f"{url.rstrip('/')} {endpoint}" if isinstance(url, str) else None,
        unshared=tier.get("shared") in (False, "false"),
    )


def _endpoint(options: object) -> str:
    """Return the server that the options name: two servers may have buckets of the same name."""
    if not isinstance(options, Mapping):
        return ""
    client = options.get("client_kwargs")
    found = options.get("endpoint_url") or options.get("account_name")
    if not found and isinstance(client, Mapping):
        found = client.get("endpoint_url")
    return str(found or "")


def check_chain(links: Sequence[Link]) -> list[Problem]:
    """Return the problems of the chain, each with its place."""
    if not links:
        return [_problem("the list is empty; expected at least a tier of kind host", "tiers")]
    folders = [_real_path(link.folder) if link.folder else None for link in links]
    keys = ["url" if link.kind is TierKind.OBJECT else "path" for link in links]
    return [
        *_kinds(links),
        *_inside(folders),
        *_order(links),
        *_shared(links),
        *_peers_alone(links),
        *_twice(
            [link.name for link in links],
            ["name"] * len(links),
            "tiers are identified by their names",
        ),
        *_twice(folders, keys, "two tiers in one folder would count one copy as two"),
        *_twice(
            [link.url for link in links], keys, "two tiers in one place would count one copy as two"
        ),
    ]


def _shared(links: Sequence[Link]) -> Iterator[Problem]:
    for index, link in enumerate(links):
        if link.kind is TierKind.OBJECT and link.url is not None and link.unshared:
            yield _problem(
                "every node sees an object store; leave shared out", "tiers", index, "shared"
            )


def _peers_alone(links: Sequence[Link]) -> Iterator[Problem]:
    kinds = [link.kind for link in links]
    if TierKind.PEER in kinds and not {TierKind.FILE, TierKind.OBJECT, None} & set(kinds):
        yield _problem(
            "a peer tier, and no tier of kind file or object: memory ends with a power cut, so there must be one, such "
            "as {name: pfs, kind: file, path: /lustre/checkpoints, flush: {every: 20}}",
            *("tiers", kinds.index(TierKind.PEER), "kind"),
        )


def _inside(folders: Sequence[str | None]) -> Iterator[Problem]:
    for index, folder in enumerate(folders):
        for other, around in enumerate(folders):
            if folder and around and folder != around and Path(folder).is_relative_to(around):
                yield _problem(
                    f"inside the folder of tiers[{other}], which would take it for a run of its own; expected a folder "
                    "beside it",
                    *("tiers", index, "path"),
                )


def _real_path(path: str) -> str | None:
    try:
        return os.path.realpath(path)
    except ValueError:  # not a path: the field's own check reports it
        return None


def _problem(message: str, *place: str | int) -> Problem:
    return Problem(place=place, message=message)


def _kinds(links: Sequence[Link]) -> Iterator[Problem]:
    kinds = [link.kind for link in links]
    for kind in (TierKind.DEVICE, TierKind.HOST, TierKind.PEER):
        for index in [i for i, found in enumerate(kinds) if found is kind][1:]:
            expected = "exactly one" if kind is TierKind.HOST else "one at most"
            yield _problem(f"a second {kind} tier; expected {expected}", "tiers", index, "kind")
    if TierKind.HOST not in kinds and None not in kinds:
        yield _problem(
            "there is no host tier, and every checkpoint passes through one; add {name: host, kind: host}",
            "tiers",
        )


def _order(links: Sequence[Link]) -> Iterator[Problem]:
    """The order is device, host, then stored tiers, which the user orders, fastest first."""
    highest = 0
    for index, link in enumerate(links):
        if link.kind is None:
            continue
        if _RANKS.get(link.kind, 2) < highest:
            yield _problem(
                f"{with_article(link.kind)} tier must come earlier; expected device, host, then peer, file and object "
                "tiers, fastest first",
                *("tiers", index, "kind"),
            )
        highest = max(highest, _RANKS.get(link.kind, 2))


def _twice(values: Sequence[Hashable | None], keys: Sequence[str], why: str) -> Iterator[Problem]:
    first: dict[Hashable, int] = {}
    for index, value in enumerate(values):
        if value is not None and first.setdefault(value, index) != index:
            yield _problem(
                f"the same {keys[index]} as tiers[{first[value]}]; {why}",
                *("tiers", index, keys[index]),
            )


# The first level -------------------------------------------------------------------------------------


CHAIN = "chain"
"""The type of the error whose context has the problems of the chain as ``findings``."""


def _expand_tiers(value: object) -> object:
    """Expand a path alone to host memory and a folder named ``disk``, an address alone to an object tier ``store``."""
    if not isinstance(value, str | Path):
        return value
    stored = {"name": "disk", "kind": TierKind.FILE.value, "path": value}
    if is_address(value):
        stored = {"name": "store", "kind": TierKind.OBJECT.value, "url": value}
    return [{"name": "host", "kind": TierKind.HOST.value}, stored]


_EXPECTED_MODULE = "the name of a module, or the path of its file"


def _module(value: object, folder: Path) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{show(value)} is not a module; expected {_EXPECTED_MODULE}")
    return load_module(value, folder)


class Config(Section):
    """When a training run is saved, and to which tiers."""

    run: Name = Field(
        description="The name of the training run: a folder of that name in every tier.",
        examples=["gpt-small"],
    )
    plugins: tuple[Annotated[str, parsed(_module, _EXPECTED_MODULE, in_folder=True)], ...] = Field(
        default=(),
        description="Modules that register policies and backends, each imported before the other keys are read: a name "
        "that can be imported, or a file, whose path starts at the folder of this file; the .py may be left out.",
        examples=[["my_plugin"]],
    )
    interval: Annotated[
        IntervalSection,
        BeforeValidator(
            lambda value: IntervalSection() if value is None else value, IntervalSection | None
        ),
    ] = Field(
        default=IntervalSection(),
        description="When maybe_save saves; absent: as often as 3.5% of the training time allows.",
        examples=[{"every": 100}],
    )
    capture: CaptureSection = Field(
        default=CaptureSection(),
        description="How the state is copied.",
        examples=[{"mode": "lazy", "verify": "sample"}],
    )
    drain: DrainSection | None = Field(
        default=None,
        description="What is done when a signal announces the end of the process; absent: nothing, and no signal "
        "is handled.",
        examples=[{"on_signal": ["SIGTERM"], "deadline": "25s"}],
    )
    on_error: Annotated[OnError, choice(OnError), any_word(OnError)] = Field(
        default=OnError.WARN,
        description="What a failed flush does to the training loop: warn logs and counts it, raise lets "
        "the next save, or close, raise it.",
        examples=["raise"],
    )
    max_wait_s: Wait = Field(
        default=60.0,
        alias="max_wait",
        description="The most that a save or a close may wait for a tier, or the barrier for a capture; above 0.",
        examples=["60s"],
        json_schema_extra={"default": "60s"},
    )
    chunk_bytes: Chunk = Field(
        default=16 << 20,
        alias="chunk",
        description="The unit of copying, checksum and retry: a multiple of 4KiB from 4KiB to 1GiB.",
        examples=["16MiB"],
        json_schema_extra={"default": "16MiB"},
    )
    verify_bytes_per_s: Rate = Field(
        default=64 << 20,
        alias="verify_bandwidth",
        description="The most that each rank reads of a tier, in the background, to verify copies of earlier starts "
        "before an older one is dropped because of them.",
        examples=["64MiB/s"],
        json_schema_extra={"default": "64MiB/s"},
    )
    events: Annotated[EventsSection, BeforeValidator(expand_events, str | EventsSection)] | None = (
        Field(
            default=None,
            description="The event log, one line of JSON per event: a file, or a mapping of path and max; "
            "absent: none.",
            examples=[{"path": "./events.jsonl"}],
        )
    )
    metrics: MetricsSection | None = Field(
        default=None,
        description="Where metrics are served; absent: nowhere.",
        examples=[{"prometheus": 9109}],
    )
    tiers: Annotated[tuple[Tier, ...], BeforeValidator(_expand_tiers, str | tuple[Tier, ...])] = (
        Field(
            description="The chain, fastest first; or a path or an address alone, which means host memory and that "
            "folder or object store.",
            examples=[
                [
                    {"name": "host", "kind": "host"},
                    {"name": "disk", "kind": "file", "path": "./checkpoints"},
                ]
            ],
        )
    )

    @model_validator(mode="after")
    def _chain_is_valid(self) -> Self:
        findings = check_chain(
            [
                link_of(
                    tier.model_dump(include={"name", "kind", "path", "url", "shared", "options"})
                )
                for tier in self.tiers
            ]
        )
        if findings:
            message = "; ".join(f"{write_place(f.place)}: {f.message}" for f in findings)
            raise PydanticCustomError(
                CHAIN, "{message}", {"message": message, "findings": findings}
            )
        return self

    @cached_property
    def file(self) -> Path | None:
        """The absolute path of the file that this was read from; None for a dict. It is no part of what is compared."""
        return None

    def read_from(self, file: Path) -> Self:
        """Return this, with the path of the file that it was read from."""
        self.__dict__["file"] = file
        return self

    @property
    def host(self) -> HostTierConfig:
        """The tier that every checkpoint passes through."""
        return next(tier for tier in self.tiers if isinstance(tier, HostTierConfig))

    @property
    def device(self) -> DeviceTierConfig | None:
        """The spare memory of the GPU, if the chain has any."""
        return next((tier for tier in self.tiers if isinstance(tier, DeviceTierConfig)), None)

    @property
    def chain(self) -> tuple[HostTierConfig | FileTierConfig | ObjectTierConfig, ...]:
        """The tiers that store checkpoints, fastest first."""
        return tuple(tier for tier in self.tiers if not isinstance(tier, DeviceTierConfig))

    @property
    def stored(self) -> tuple[FileTierConfig | ObjectTierConfig, ...]:
        """The folders and object stores of the chain, fastest first."""
        return tuple(
            tier for tier in self.tiers if isinstance(tier, FileTierConfig | ObjectTierConfig)
        )

    @property
    def storage(self) -> tuple[FileTierConfig | ObjectTierConfig, ...]:
        """Those of ``stored`` that are no memory of other nodes."""
        return tuple(tier for tier in self.stored if not isinstance(tier, PeerTierConfig))

    @property
    def written(self) -> tuple[FileTierConfig | ObjectTierConfig, ...]:
        """The folders and object stores that are written to, fastest first."""
        return tuple(tier for tier in self.stored if not tier.read_only)

    @property
    def peers(self) -> PeerTierConfig | None:
        """The memory of other nodes, if the chain has it."""
        return next((tier for tier in self.tiers if isinstance(tier, PeerTierConfig)), None)

    @property
    def peer_copies(self) -> dict[str, int]:
        """How many other nodes keep each image, by the tier that has them do so."""
        peers = self.peers
        return {} if peers is None else {peers.name: peers.copies}

    def without(self, name: str) -> Self:
        """Return a copy without the tier of this name."""
        tiers = tuple(tier for tier in self.tiers if tier.name != name)
        return self.model_copy(update={"tiers": tiers})

    def without_peers(self) -> Self:
        """Return a copy without memory of other nodes."""
        return self if self.peers is None else self.without(self.peers.name)

    def with_keys(self, names: Collection[str], **keys: object) -> Self:
        """Return a copy in which the tiers of these names have other values of some keys."""
        tiers = (t.model_copy(update=keys) if t.name in names else t for t in self.tiers)
        return self.model_copy(update={"tiers": tuple(tiers)})
