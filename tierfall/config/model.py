"""The model of the YAML file: its first level.

The model contains numbers and absolute paths; it opens nothing. Single values are checked in ``fields``, the tiers
together in ``chain``.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from tierfall.config.chain import check_chain, link_of
from tierfall.config.fields import (
    Chunk,
    Name,
    Rate,
    Wait,
    any_word,
    choice,
    folder_of,
    is_address,
    show,
    value_error,
)
from tierfall.config.interval import IntervalSection
from tierfall.config.plugins import load_module
from tierfall.config.sections import (
    CaptureSection,
    DrainSection,
    EventsSection,
    MetricsSection,
    Section,
    expand_events,
)
from tierfall.config.source import write_place
from tierfall.config.tiers import (
    DeviceTierConfig,
    FileTierConfig,
    HostTierConfig,
    ObjectTierConfig,
    PeerTierConfig,
    Tier,
)
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import OnError, TierKind

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


def _or_default(value: object) -> object:
    return IntervalSection() if value is None else value


_EXPECTED_MODULE = "the name of a module, or the path of its file"


def _load_module(value: object, info: ValidationInfo) -> str:
    if not isinstance(value, str) or not value:
        message = f"{show(value)} is not a module; expected {_EXPECTED_MODULE}"
        raise value_error(message, expected=_EXPECTED_MODULE)
    try:
        return load_module(value, folder_of(info))
    except ConfigError as error:
        message = str(error)
    raise value_error(message, expected=_EXPECTED_MODULE)


class Config(Section):
    """When a training run is saved, and to which tiers."""

    run: Name = Field(
        description="The name of the training run: a folder of that name in every tier.",
        examples=["gpt-small"],
    )
    plugins: tuple[Annotated[str, BeforeValidator(_load_module, str)], ...] = Field(
        default=(),
        description="Modules that register policies and backends, each imported before the other keys are read: a name "
        "that can be imported, or a file, whose path starts at the folder of this file; the .py may be left out.",
        examples=[["my_plugin"]],
    )
    interval: Annotated[IntervalSection, BeforeValidator(_or_default, IntervalSection | None)] = (
        Field(
            default=IntervalSection(),
            description="When maybe_save saves; absent: as often as 3.5% of the training time allows.",
            examples=[{"every": 100}],
        )
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
        description="The most that a save, a barrier or a close may wait for a tier; above 0.",
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

    def reading_only(self, names: Collection[str]) -> Self:
        """Return a copy in which the tiers of these names are read-only."""
        return self.model_copy(
            update={
                "tiers": tuple(
                    tier.model_copy(update={"read_only": True}) if tier.name in names else tier
                    for tier in self.tiers
                )
            }
        )
