"""The sections of the YAML file that are the tiers: one class for each kind.

They contain numbers and absolute paths, and open nothing. ``chain`` checks the tiers together.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tierfall.config.chain import FOLDER
from tierfall.config.fields import (
    Bandwidth,
    Count,
    Flag,
    Folder,
    Name,
    Rate,
    Size,
    Url,
    Wait,
    any_word,
    choice,
    no_address,
    value_error,
)
from tierfall.config.retention import EvictSection, RetainSection
from tierfall.config.sections import (
    CompressSection,
    FlushSection,
    OnClose,
    Section,
)
from tierfall.core.types.values import Driver, TierKind, WhenFull
from tierfall.tiers.arena.folder import default_folder

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
        description="How much to allocate when the run is opened, per rank.",
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
        description="How much to allocate, per rank; absent: 2.2 times the first image, with a peer tier 3.2 times, at "
        "most half of the free memory.",
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
    (
        *("bandwidth", "capacity_bytes", "compress", "evict", "flush", "max_wait_s", "retain"),
        "when_full",
    )
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
        "None is given up that is needed. Absent: as the host tier.",
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
    shared: Literal[False] = Field(
        default=False,
        description="Always false: each node keeps other images.",
        examples=[False],
    )
    retain: RetainSection = Field(
        default=RetainSection(last=1),
        description="Which checkpoints are kept there; absent: the newest, since each takes memory.",
        examples=[{"last": 2}],
    )

    @property
    def bandwidth_bytes_per_s(self) -> int | None:
        """The most of an image that may be sent per second: each byte is sent to every node that keeps a copy."""
        limit = super().bandwidth_bytes_per_s
        return None if limit is None else max(1, limit // self.copies)


def _not_obstore(value: object) -> object:
    if value == "obstore":
        raise value_error(
            "obstore is not used any more; remove driver: gs:// and az:// are accessed by fsspec (gcsfs, adlfs), s3:// "
            "by tierfall's own client",
            expected="fsspec, or no driver",
        )
    return value


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
    driver: (
        Annotated[Driver, choice(Driver), BeforeValidator(_not_obstore), any_word(Driver)] | None
    ) = Field(
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
