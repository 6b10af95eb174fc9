"""The model of the YAML file: every key, its default and its meaning. docs/configuration.md is written from it.

A key in YAML is the name of the attribute without its unit. The model contains numbers and absolute paths; it opens
nothing. Types of values are in ``fields``. A key of ``interval`` or ``retain`` that the section does not have is the
name of a registered policy (``tierfall.config.plugins``), whose own model validates its value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo

from tierfall.config import fields, plugins
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.policy import PolicyKind, Rule
from tierfall.core.types.text import with_article
from tierfall.core.types.units import format_size
from tierfall.core.types.values import (
    CaptureMode,
    Codec,
    Direction,
    Driver,
    OnError,
    TierKind,
    Verify,
    WhenFull,
)
from tierfall.policies.flush import IN_ORDER
from tierfall.policies.retention import BestRule, EveryRule, TagsRule
from tierfall.tiers.host_folder import default_folder


class Section(BaseModel):
    """A mapping of the file: frozen, without unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
        alias_generator=lambda name: re.sub("_(bytes_per_s|bytes|s)$", "", name),
    )


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their keys in YAML."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


class PolicySection(Section):
    """A section whose other keys are the names of registered policies, each with its settings."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"additionalProperties": {"type": "object"}}
    )
    policy_kind: ClassVar[PolicyKind]

    @model_validator(mode="before")
    @classmethod
    def _read_policies(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return plugins.read_policies(cls.policy_kind, value, [*fields_of(cls)])

    def registered(self) -> list[Rule]:
        """Return the registered policies that are configured, as rules of their kind."""
        named = (self.model_extra or {}).items()
        return [plugins.rule(self.policy_kind, name, rules) for name, rules in named]


def _alone(key: str, types: Any, section: Any) -> BeforeValidator:
    """Accept a value of these types in place of a section: it stands for that key."""
    return BeforeValidator(
        lambda value: {key: value} if isinstance(value, types) else value, types | section
    )


# When maybe_save saves -------------------------------------------------------------------------------


OVERHEAD = 0.035
"""The default share of training time that saving may cost: CheckFreq's (FAST'21)."""


class Mtbf(Section):
    """How often training fails, by loss class. Each includes the more severe classes."""

    process_s: fields.Wait | None = Field(default=None, examples=["4h"])
    """The mean time between failures that end the training, whatever else they destroy; absent: as `node`.
    `mtbf: 4h` means `{process: 4h}`."""
    node_s: fields.Wait | None = Field(default=None, examples=["12h"])
    """The mean time between failures that lose a node, with its memory and its disks; absent: as `process`."""
    site_s: fields.Wait | None = Field(default=None, examples=["90d"])
    """The mean time between failures that lose everything but object stores; absent: as `node`."""

    @model_validator(mode="after")
    def _increases(self) -> Self:
        times = [s for s in (self.process_s, self.node_s, self.site_s) if s is not None]
        if not times:
            raise ConfigError("has no time; expected 4h, or {process: 4h, node: 12h}")
        if times != sorted(times):
            raise ConfigError(
                "a more severe loss occurs more often than a less severe one; expected process at most node, and node "
                "at most site: the loss of a node is also the loss of its processes"
            )
        return self


class IntervalSection(PolicySection):
    """When maybe_save saves: by one of every, overhead and mtbf, or a registered policy; on_signal and at_end are
    additional."""

    policy_kind = PolicyKind.INTERVAL

    every: fields.Every | None = Field(default=None, examples=[100])
    """Save every so many training steps, or every so much time."""
    overhead: fields.Overhead | None = Field(default=None, examples=["3.5%"])
    """The share of training time that saving may cost: the interval is computed from measured steps and saves. Absent:
    3.5%, if neither `every` nor `mtbf` is set."""
    mtbf: Annotated[Mtbf | None, _alone("process", str | int | float, Mtbf | None)] = Field(
        default=None, examples=["4h"]
    )
    """The mean time between failures, or one for each loss class: the interval is computed that loses the least time to
    saving and to failures together (Young and Daly)."""
    on_signal: tuple[fields.Signal, ...] = Field(default=(), examples=[["SIGTERM"]])
    """Signals on which the next `maybe_save` saves, also between two steps of the interval."""
    at_end: fields.Flag = Field(default=True, examples=[False])
    """Whether `close` saves the last step that `maybe_save` was given, if it is not saved yet."""

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        named = [n for n in ("every", "overhead", "mtbf") if getattr(self, n) is not None]
        named += self.model_extra or {}
        if len(named) > 1:
            raise ConfigError(
                f"{' and '.join(named)} cannot stand together; keep one: every (a fixed interval), overhead (from what "
                "saving costs) or mtbf (from what saving and failures cost)"
            )
        return self

    @property
    def every_steps(self) -> int | None:
        """The interval in steps, if it is set in steps."""
        return self.every if isinstance(self.every, int) else None

    @property
    def every_s(self) -> float | None:
        """The interval in seconds, if it is set as a time."""
        return self.every if isinstance(self.every, float) else None

    def rule(self) -> Rule | None:
        """Return the registered policy that is configured, as a rule of kind ``interval``; None if there is none."""
        return next(iter(self.registered()), None)

    @property
    def budget(self) -> float | None:
        """The share of training time that saving may cost; None where every or mtbf decides. It also applies where a
        plug-in's policy has no answer."""
        if self.every is not None or self.mtbf is not None:
            return None
        return OVERHEAD if self.overhead is None else self.overhead


# Other sections of the first level -------------------------------------------------------------------


class CaptureSection(Section):
    """How the state is copied."""

    mode: CaptureMode = Field(default=CaptureMode.LAZY, examples=["blocking"])
    """`lazy`: `save` returns at once, and the state is copied until the optimizer's next step. `blocking`: `save`
    returns when the state is copied."""
    verify: fields.Switch = Field(default=Verify.SAMPLE, examples=["full"])
    """How much of a lazily captured image is compared with the state as it was at `save`. `sample`: short tensors
    whole, and samples of longer ones. `full` (or `true`): every byte in host memory. `off` (or `false`): only version
    counters and addresses."""
    threads: fields.Count | None = Field(default=None, examples=[4])
    """How many threads hash an image that is mostly on GPUs, and verify a restore. Absent: as many as the process may
    use cores, at most 8; ranks that may use the same cores divide them."""
    bandwidth_bytes_per_s: fields.Rate | None = Field(default=None, examples=["10GB/s"])
    """The most that a lazy capture takes of the bus to the device, or of memory, until the optimizer's step waits for
    it; absent: no limit."""


class DrainSection(Section):
    """What is done when a signal announces the end of the process."""

    on_signal: Annotated[tuple[fields.Signal, ...], Field(min_length=1)] = Field(
        default=("SIGTERM",), examples=[["SIGTERM"]]
    )
    """The signals that announce the end, by name. After such a signal the run copies, until the deadline, what can
    still become durable."""
    deadline_s: fields.Wait = Field(default="25s", validate_default=True, examples=["110s"])
    """How long the drain may take: a little less than the notice before the process is killed."""


RANK, RUN = "{rank}", "{run}"
MAX_BYTES_LEAST = 64 << 10


def _check_placeholders(path: Path) -> Path:
    for found in re.findall(r"\{[^{}]*\}", str(path)):
        if found not in (RANK, RUN):
            raise ConfigError(
                f'"{found}" is not a placeholder; expected a file such as ./events.jsonl, with {RANK} and {RUN} to be '
                "filled in"
            )
    return path


def _check_max_bytes(max_bytes: int) -> int:
    if max_bytes < MAX_BYTES_LEAST:
        raise ConfigError(
            f"{max_bytes} bytes are too few; expected {format_size(MAX_BYTES_LEAST)} or more"
        )
    return max_bytes


class EventsSection(Section):
    """The event log: one line of JSON per event."""

    path: Annotated[fields.Folder, AfterValidator(_check_placeholders)] = Field(
        examples=["./events-{rank}.jsonl"]
    )
    """The file. `{run}` in it stands for the name of the run. Rank 0 writes it for all ranks; with `{rank}` in it, each
    rank writes its own."""
    max_bytes: Annotated[fields.Size, AfterValidator(_check_max_bytes)] = Field(
        default="64MiB", validate_default=True, examples=["1GiB"]
    )
    """The most that it takes on disk, 64KiB or more. A file that reaches half of that is renamed: `.1` is appended to
    its name, and an older file of that name is replaced."""

    def file_of(self, *, run: str, rank: int) -> Path | None:
        """Return the file that a rank writes; None if it writes none."""
        text = str(self.path)
        if rank != 0 and RANK not in text:
            return None
        return Path(text.replace(RUN, run).replace(RANK, str(rank)))


class MetricsSection(Section):
    """Where the run's metrics are served."""

    prometheus: fields.Listen = Field(examples=[9109])
    """The port of an HTTP server with `/metrics` for Prometheus, and `/healthz`; or an address and a port, such as
    `127.0.0.1:9109`. The first rank of each node serves its own."""

    @property
    def listens_on(self) -> tuple[str, int]:
        """The address, empty for all of this machine, and the port."""
        return fields.listen_address(self.prometheus)


# What a tier receives, keeps and deletes -------------------------------------------------------------


_ORDER_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "object", "maxProperties": 1}]}
)


class FlushSection(Section):
    """Which checkpoints a tier receives."""

    every: fields.Count = Field(default=1, examples=[10])
    """The tier gets every so many of the saved checkpoints (not of the training steps), counted over restarts."""
    order: Annotated[
        dict[str, Any] | None,
        BeforeValidator(lambda value: plugins.read_order(PolicyKind.FLUSH, value)),
        _ORDER_SCHEMA,
    ] = Field(default=None, examples=["newest_first"])
    """Which waiting checkpoint is copied first: the oldest (`in_order`, the default), the newest (`newest_first`), or
    that of a registered order."""
    within_s: fields.Wait | None = Field(default=None, examples=["10m"])
    """How far behind the tier may be: the age of the oldest checkpoint that is newer than all that it has. If it is
    further behind, that is reported."""
    yields: fields.Flag = Field(default=True, alias="yield", examples=[False])
    """Whether the tier is written slower while flushing slows training steps."""

    def rule(self) -> Rule | None:
        """Return the order as a rule of kind ``flush``; None for the default, also where it is named."""
        if IN_ORDER in (self.order or ()):
            return None
        return plugins.order_rule(PolicyKind.FLUSH, self.order)


class BestSection(Section):
    """The best checkpoints by a metric."""

    metric: str = Field(examples=["loss"])
    """The name of the metric, as given to `save`."""
    mode: Direction = Field(default=Direction.MIN, examples=["max"])
    """Whether less is better (`min`), or more (`max`)."""
    count: fields.Count = Field(default=1, examples=[2])
    """How many to keep."""


class RetainSection(PolicySection):
    """Which checkpoints a tier keeps: those that any of these rules keeps. Pinned ones and the newest are kept in any
    case. Other keys are registered rules."""

    policy_kind = PolicyKind.RETAIN

    last: fields.Count | None = Field(default=None, examples=[3])
    """Keep the newest so many."""
    every: fields.Every | None = Field(default=None, examples=[1000, "1d"])
    """A whole number: keep the first at or after each multiple of so many training steps. A time with its unit, such as
    `1d`: keep the first of each such period, in UTC."""
    best: BestSection | None = Field(
        default=None, examples=[{"metric": "loss", "mode": "min", "count": 2}]
    )
    """Keep the best by a metric."""
    for_s: fields.Wait | None = Field(default=None, examples=["30d"])
    """Keep what was saved less than this time ago; alone, it deletes everything older."""
    tags: fields.Tags | None = Field(default=None, examples=[["release"], True])
    """Keep what has one of these tags; `true`: any tag."""

    def rules(self) -> tuple[Rule, ...]:
        """Return the configured rules, each bound to its policy of kind ``retain``."""
        steps = self.every if isinstance(self.every, int) else None
        names = () if isinstance(self.tags, bool | None) else self.tags
        rules: dict[str, Any] = {
            "last": self.last,
            "every": self.every and EveryRule(steps=steps, period_s=None if steps else self.every),
            "best": self.best and BestRule(**dict(self.best)),
            "for": self.for_s,
            "tags": self.tags and TagsRule(names=names),
        }
        configured = [(name, value) for name, value in rules.items() if value is not None]
        built_in = (plugins.rule(PolicyKind.RETAIN, name, value) for name, value in configured)
        return (*built_in, *self.registered())


class EvictSection(Section):
    """What a tier deletes if its capacity is short: first what no rule of retain keeps."""

    high: fields.Share | None = Field(default=None, examples=["90%"])
    """The share of `capacity` above which copies are deleted; absent: only if there is no room."""
    low: fields.Share | None = Field(default=None, examples=["80%"])
    """The share of `capacity` down to which they are then deleted; absent: as `high`."""
    order: Annotated[
        dict[str, Any] | None,
        BeforeValidator(lambda value: plugins.read_order(PolicyKind.EVICT, value)),
        _ORDER_SCHEMA,
    ] = Field(default=None, examples=["oldest"])
    """What is deleted first: what another tier stores as safely and restores fastest (`cheapest`, the default), the
    `oldest`, or what a registered order names."""

    @model_validator(mode="after")
    def _check_watermarks(self) -> Self:
        if self.low is not None and self.high is None:
            raise ConfigError("low has no effect without high; expected {high: 90%, low: 80%}")
        if self.high == 0 or (self.low is not None and self.low > (self.high or 0)):
            raise ConfigError(
                "high must be above 0%, and low no higher; expected {high: 90%, low: 80%}"
            )
        return self

    def rule(self) -> Rule | None:
        """Return the order as a rule of kind ``evict``; None for the default."""
        return plugins.order_rule(PolicyKind.EVICT, self.order)


class CompressSection(Section):
    """How stored chunks are compressed."""

    codec: Codec = Field(default=Codec.NONE, examples=["zstd"])
    """`none`: uncompressed. `zstd`: the zstd seekable format, which `zstd -d` unpacks to the safetensors file.
    `planes`: the bytes of a chunk grouped by their position in an item, then zstd; about 12 % smaller and twice as
    fast to read, by tierfall only."""
    level: fields.Level | None = Field(default=None, examples=[3])
    """The level of zstd, from 1 (the default, and usually the best choice) to 19."""

    @model_validator(mode="after")
    def _level_has_a_codec(self) -> Self:
        if self.level is not None and self.codec is Codec.NONE:
            raise ConfigError(
                "a level without a codec; expected {codec: zstd, level: 3}, or no level"
            )
        return self


# Tiers -----------------------------------------------------------------------------------------------


FOLDER = "file://"
PEER_FOLDER = ".peers"
"""No run has such a name."""
NODE_SPREAD = "node"


class OnClose(StrEnum):
    """What a clean close does with the images in memory, once all are durable below."""

    RELEASE = "release"
    KEEP = "keep"


class _Tier(Section):
    name: fields.Name = Field(examples=["nvme"])
    """The tier's name."""


class DeviceTierConfig(_Tier):
    """Spare memory of the GPU, per rank, for tensors that a step would wait for. It stores no checkpoint."""

    kind: Literal[TierKind.DEVICE] = Field(examples=["device"])
    """Spare memory of the GPU. Without a GPU the tier is omitted, with a warning."""
    capacity_bytes: fields.Size = Field(examples=["4GiB"])
    """How much to allocate at the first save, per rank."""


class HostTierConfig(_Tier):
    """Memory of the host, page-locked where there is a device; each rank has its own."""

    kind: Literal[TierKind.HOST] = Field(examples=["host"])
    """Memory of the host. There is exactly one such tier."""
    capacity_bytes: fields.Size | None = Field(default=None, examples=["16GiB"])
    """How much each rank takes. Absent: two images (three with a `peer` tier), and one more if saves wait and there is
    room. All ranks of a node take at most three quarters of its free memory, with a `peer` tier half."""
    when_full: WhenFull = Field(default=WhenFull.WAIT, examples=["supersede"])
    """What a save does if there is no room. `wait`: it waits, up to `max_wait`, and is skipped then. `skip`: it is
    skipped at once. `supersede`: it takes the room of the oldest image that no stored tier has or is copying."""
    folder: fields.Folder | None = Field(default=None, examples=["/dev/shm/checkpoints"])
    """The folder of the memory's files. Absent: a folder of the user's own in `/dev/shm`, or in the temporary folder if
    there is no `/dev/shm`."""
    on_close: OnClose = Field(default=OnClose.RELEASE, examples=["keep"])
    """`release`: a clean close frees the memory, if the stored tiers are owed nothing, and a check finds the newest
    checkpoint, and what is pinned in memory, complete there. `keep`: the images remain in memory for the next start."""


class StoredTierConfig(_Tier):
    """A tier that stores checkpoints in files or objects."""

    read_only: fields.Flag = Field(default=False, examples=[True])
    """Whether the tier is only restored from."""
    shared: fields.Flag | None = Field(default=None, examples=[True])
    """Whether all nodes see the same files. A tier that is not shared does not survive the loss of a node. Absent: an
    object store is shared, and for a folder `open` finds out if there are several nodes."""
    capacity_bytes: fields.Size | None = Field(default=None, examples=["500GiB"])
    """The most that tierfall may store there, per node if it is not shared; absent: what the medium has."""
    flush: FlushSection = Field(default=FlushSection(), examples=[{"every": 1}])
    """Which checkpoints the tier receives."""
    retain: RetainSection = Field(default=RetainSection(), examples=[{"last": 3}])
    """Which checkpoints it keeps; absent: everything that fits."""
    evict: EvictSection = Field(default=EvictSection(), examples=[{"order": "oldest"}])
    """What it deletes if its capacity is short."""
    compress: CompressSection = Field(default=CompressSection(), examples=[{"codec": "none"}])
    """How chunks are compressed there."""
    bandwidth: fields.Bandwidth | None = Field(default=None, examples=["500MB/s", "50%"])
    """The most that one rank writes there per second: a rate, or a share of how fast the tier was measured to be;
    absent: no limit."""
    read_bandwidth: fields.Rate | None = Field(default=None, examples=["2GB/s"])
    """The most that one rank reads from there per second; absent: no limit."""
    when_full: WhenFull | None = Field(default=None, examples=["supersede"])
    """What happens to checkpoints that wait for this tier while memory is full of them. `wait`: saves wait. `skip`: the
    newest is not copied there. `supersede`: the oldest is not. Absent: `supersede` if the host tier has it, else
    `wait`."""
    max_wait_s: fields.Wait | None = Field(default=None, examples=["10s"])
    """A save waits at most so long for this tier, and one that fails longer is reported; absent: the run's
    `max_wait`."""

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
        of_writing = {*StoredTierConfig.__annotations__, "keep_free"}
        of_writing -= {"read_only", "shared", "read_bandwidth"}
        given = sorted(of_writing & self.model_fields_set)
        if self.read_only and given:
            words = ", ".join(type(self).model_fields[name].alias or name for name in given)
            raise ConfigError(
                f"read_only: true, and {words}: nothing is written to a tier that is only restored from; remove one of "
                "them"
            )
        return self

    @model_validator(mode="after")
    def _watermarks_have_a_capacity(self) -> Self:
        if self.evict.high is not None and self.capacity_bytes is None:
            raise ConfigError(
                "evict.high is a share of the tier's capacity, which is not set; expected one such as capacity: 500GiB"
            )
        return self


class FileTierConfig(StoredTierConfig):
    """A folder: a local disk, or a parallel file system."""

    kind: Literal[TierKind.FILE] = Field(examples=["file"])
    """A folder."""
    path: fields.Folder = Field(examples=["./checkpoints"])
    """The folder."""
    keep_free: fields.Free | None = Field(default=None, examples=["10%", "50GiB"])
    """The part of its disk that is to stay free, whoever fills the rest. If a copy would take some of it, older copies
    are deleted first, as `evict` says. Absent: only once a write finds the disk full."""

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
        raise ConfigError(
            f"a peer tier accepts flush.every only: remove {names}. Images are sent in the order of their saves, and "
            "more slowly while that slows training"
        )
    return section


class PeerTierConfig(FileTierConfig):
    """Memory of other nodes: each node keeps the images of others. With one node the tier is left out."""

    kind: Literal[TierKind.PEER] = Field(examples=["peer"])  # type: ignore[assignment]
    """The memory of other nodes. There is one such tier at most."""
    path: fields.Folder = Field(
        default_factory=lambda: default_folder() / PEER_FOLDER, examples=["/dev/shm/peers"]
    )
    """The folder of the images that this node keeps for others; each run has its own there. Absent: one in the folder
    that is the host tier's default."""
    copies: fields.Count = Field(default=1, examples=[2])
    """How many other nodes keep each image."""
    spread: fields.Name = Field(default=NODE_SPREAD, examples=["rack"])
    """What no two copies of an image share, its own node's included: the `node`, or a kind of failure domain, such as
    `rack`."""
    domains: fields.Folder | None = Field(default=None, examples=["./racks.txt"])
    """A file with the failure domain of each node, in lines `HOSTNAME DOMAIN`."""
    interface: fields.Interface | None = Field(default=None, examples=["ib0"])
    """The network that carries the images: the name of an interface of each node, or a subnet such as `10.1.0.0/16`;
    absent: the one that leads to rank 0."""
    flush: Annotated[FlushSection, AfterValidator(_only_every)] = Field(
        default=FlushSection(), examples=[{"every": 1}]
    )
    """Which checkpoints are sent: `every` alone."""
    # What is kept is one rule: the newest checkpoint that is whole, and the one that arrives.
    keep_free: ClassVar[None] = None  # type: ignore[misc]
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


class ObjectTierConfig(StoredTierConfig):
    """An object store, or any address that fsspec supports."""

    kind: Literal[TierKind.OBJECT] = Field(examples=["object"])
    """An object store, by its address."""
    url: fields.Url = Field(examples=["s3://bucket/checkpoints"])
    """The address: `s3://bucket/prefix`, `gs://`, `az://`, `file:///folder`, or another of fsspec's."""
    options: dict[str, Any] = Field(
        default_factory=dict, repr=False, examples=[{"endpoint_url": "${env:S3_ENDPOINT}"}]
    )
    """fsspec's storage options: `endpoint_url`, `key`, `secret` and so on. Never shown."""
    driver: Driver | None = Field(default=None, examples=["fsspec"])
    """`fsspec`: its library accesses `s3://` and `file://`, too, in place of tierfall's own clients."""

    @model_validator(mode="after")
    def _store_is_shared(self) -> Self:
        if self.folder is None and self.shared is False:
            raise ConfigError("shared: false, but every node sees an object store; remove shared")
        return self

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


Place = tuple[str | int, ...]
"""The path from the top to a value, ``("tiers", 2, "flush", "every")``; written ``tiers[2].flush.every``."""


class Problem(NamedTuple):
    """One error in a configuration."""

    place: Place
    message: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (write_place(self.place), self.message)))


def write_place(place: Place) -> str:
    """Write a place as in ``tiers[2].flush.every``; empty for the whole configuration."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")


class _Link(NamedTuple):
    """What the chain is checked by, of one tier; None where missing or invalid. ``place``: the folder, or the address
    and its server, since two servers may have buckets of the same name."""

    name: str | None
    kind: TierKind | None
    folder: Path | None
    place: object


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _link_of(tier: object, base: Path | None) -> _Link:
    name, kind, path, url = (_mapping(tier).get(key) for key in ("name", "kind", "path", "url"))
    if isinstance(url, str) and url.startswith(FOLDER):
        path, url = url.removeprefix(FOLDER), None
    folder = None
    if isinstance(path, str | os.PathLike) and path:
        with suppress(ValueError):  # not a path: the field's own check reports it
            folder = Path(os.path.realpath(Path(base or "", os.path.expanduser(path))))
    options = _mapping(_mapping(tier).get("options"))
    client = _mapping(options.get("client_kwargs"))
    server = (
        options.get("endpoint_url") or options.get("account_name") or client.get("endpoint_url")
    )
    return _Link(
        name=name if isinstance(name, str) else None,
        kind=TierKind(kind) if isinstance(kind, str) and kind in set(TierKind) else None,
        folder=folder,
        place=(url.rstrip("/"), server) if isinstance(url, str) else folder,
    )


def check_chain(tiers: Sequence[object], base: Path | None = None) -> list[Problem]:
    """Return what is wrong with the tiers together: which kinds, in which order, and no duplicates.

    The tiers are as YAML yields them: so this works on a configuration with errors elsewhere, too. A relative path
    starts at ``base``. Messages name places, never values: a value may be from the environment.
    """
    links = [_link_of(tier, base) for tier in tiers]
    kinds = [link.kind for link in links]
    found = [
        Problem(("tiers", index, key), message)
        for index in range(len(links))
        for key, message in _faults(links, index)
    ]
    if links and TierKind.HOST not in kinds and None not in kinds:
        message = "there is no host tier, and every checkpoint passes through one; add {name: host, kind: host}"
        found.append(Problem(("tiers",), message))
    if TierKind.PEER in kinds and not {TierKind.FILE, TierKind.OBJECT, None} & set(kinds):
        message = (
            "a peer tier, and no tier of kind file or object: memory ends with a power cut, so there must be one, such "
            "as {name: pfs, kind: file, path: /lustre/checkpoints, flush: {every: 20}}"
        )
        found.append(Problem(("tiers", kinds.index(TierKind.PEER), "kind"), message))
    return found


_ORDER = "device, host, then peer, file and object tiers, fastest first"
_RANKS = {TierKind.DEVICE: 0, TierKind.HOST: 1, None: 0}
"""Their order in the chain; stored tiers come after them, as the user orders them."""


def _faults(links: Sequence[_Link], index: int) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a tier beside the others: the key, and the message."""
    link, earlier = links[index], [link.kind for link in links[:index]]
    if link.kind in (TierKind.DEVICE, TierKind.HOST, TierKind.PEER) and link.kind in earlier:
        expected = "exactly one" if link.kind is TierKind.HOST else "one at most"
        yield "kind", f"a second {link.kind} tier; expected {expected}"
    if link.kind and any(_RANKS.get(kind, 2) > _RANKS.get(link.kind, 2) for kind in earlier):
        tier = with_article(link.kind)
        yield "kind", f"{tier} tier must come earlier; expected {_ORDER}"
    path = "url" if link.kind is TierKind.OBJECT else "path"
    for other, beside in enumerate(links):
        if other < index and link.name and link.name == beside.name:
            yield "name", f"the same name as tiers[{other}]; tiers are identified by their names"
        if other < index and link.place and link.place == beside.place:
            yield (
                path,
                f"the same place as tiers[{other}]: one copy would count as two; use another",
            )
        if link.folder and beside.folder in link.folder.parents:
            message = (
                f"inside the folder of tiers[{other}], which would take it for a run of its own"
            )
            yield path, f"{message}; expected a folder beside it"


# The first level -------------------------------------------------------------------------------------


def expand_tiers(value: object) -> object:
    """Expand a path alone to host memory and a folder named ``disk``, an address alone to an object tier ``store``."""
    if not isinstance(value, str | Path):
        return value
    stored = {"name": "disk", "kind": TierKind.FILE.value, "path": value}
    if fields.is_address(value):
        stored = {"name": "store", "kind": TierKind.OBJECT.value, "url": value}
    return [{"name": "host", "kind": TierKind.HOST.value}, stored]


def _module(value: object, info: ValidationInfo) -> str:
    if not isinstance(value, str) or not value:
        expected = "the name of a module, or the path of its file"
        raise ConfigError(f"{fields.show(value)} is not a module; expected {expected}")
    return plugins.load_module(value, fields.folder_of_file(info))


class Config(Section):
    """When a training run is saved, and to which tiers."""

    run: fields.Name = Field(examples=["gpt-small"])
    """The name of the training run: a folder of that name on every tier. May be given as `run=` of `open`, too."""
    plugins: tuple[Annotated[str, BeforeValidator(_module)], ...] = Field(
        default=(), examples=[["my_plugin"]]
    )
    """Modules that register policies and backends, imported before the other keys are read."""
    interval: Annotated[
        IntervalSection,
        BeforeValidator(
            lambda value: IntervalSection() if value is None else value, IntervalSection | None
        ),
    ] = Field(default=IntervalSection(), examples=[{"every": 100}])
    """When `maybe_save` saves; absent: as often as 3.5% of the training time allows."""
    capture: CaptureSection = Field(
        default=CaptureSection(), examples=[{"mode": "lazy", "verify": "sample"}]
    )
    """How the state is captured."""
    drain: DrainSection | None = Field(
        default=None, examples=[{"deadline": "25s", "on_signal": ["SIGTERM"]}]
    )
    """What is done when a signal announces the end of the process; absent: nothing, and no signal is handled."""
    on_error: OnError = Field(default=OnError.WARN, examples=["raise"])
    """`warn`: a failed flush is logged and counted. `raise`: the next save, or close, raises it, too."""
    max_wait_s: fields.Wait = Field(default="60s", validate_default=True, examples=["60s"])
    """The most that a save or a close waits for a tier, or the barrier for a capture. If the host tier is still full
    then, the save is skipped. A stored tier may have its own."""
    chunk_bytes: fields.Chunk = Field(default="16MiB", validate_default=True, examples=["16MiB"])
    """The unit of copying, digest and retry: a multiple of 4KiB from 4KiB to 1GiB."""
    verify_bytes_per_s: fields.Rate = Field(
        default="64MiB/s",
        validate_default=True,
        alias="verify_bandwidth",
        examples=["64MiB/s"],
    )
    """The most that each rank reads from a tier, in the background, to verify copies of earlier starts before an older
    one is deleted because of them."""
    events: Annotated[EventsSection, _alone("path", str | Path, EventsSection)] | None = Field(
        default=None, examples=[{"path": "./events.jsonl"}]
    )
    """The event log, one line of JSON per event: a file, or a mapping; absent: none."""
    metrics: MetricsSection | None = Field(default=None, examples=[{"prometheus": 9109}])
    """Where metrics are served; absent: nowhere."""
    tiers: Annotated[
        tuple[Tier, ...],
        Field(min_length=1),
        BeforeValidator(expand_tiers, str | tuple[Tier, ...]),
    ] = Field(
        examples=[
            [
                {"name": "host", "kind": "host"},
                {"name": "disk", "kind": "file", "path": "./checkpoints"},
            ]
        ]
    )
    """The chain, fastest first; or a path or an address alone."""

    def __init__(self, **values: Any) -> None:
        """Raises ConfigError, as ``load_config`` does for a dict."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            from tierfall.config.loading import explain

            raise explain(error, values) from None

    # As that of BaseModel: else pydantic calls it for a file, too, without the file's folder.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="after")
    def _chain_is_valid(self) -> Self:
        if problems := check_chain([tier.model_dump() for tier in self.tiers]):
            raise ConfigError("; ".join(map(str, problems)))
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
