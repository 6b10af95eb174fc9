"""The section ``interval`` of the YAML file: when ``maybe_save`` saves, and by what measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from tierfall.config import plugins
from tierfall.config.fields import (
    Duration,
    Flag,
    Share,
    every,
    number_or_text,
    wrong,
)
from tierfall.config.registered import known_keys, with_registered
from tierfall.config.sections import Section
from tierfall.config.signal_names import Signal
from tierfall.core.types import units
from tierfall.core.types.policy import PolicyKind, Rule

OVERHEAD = 0.035
"""What saving may cost where nobody says otherwise: CheckFreq's (FAST'21) default."""


def _above_zero(example: str) -> AfterValidator:
    def check(value: float) -> float:
        if value <= 0:
            raise wrong(f"0 does not fit; expected more, such as {example}", expected=example)
        return value

    return AfterValidator(check)


def _below_one(value: float) -> float:
    if value >= 1:
        raise wrong("100% leaves no time to train; expected less, such as 3.5%", expected="3.5%")
    return value


def _write_every(value: int | float | None) -> Any:
    """Steps as a number, a time as text: read again, it means the same."""
    return f"{value:.9f}s" if isinstance(value, float) else value


def _write_share(value: float | None) -> Any:
    return None if value is None else f"{value * 100:.9f}%"


Every = Annotated[
    int | float,
    every(),
    PlainSerializer(_write_every),
    number_or_text(units.DURATION_PATTERN, minimum=1),
]
Overhead = Annotated[
    Share, AfterValidator(_below_one), _above_zero("3.5%"), PlainSerializer(_write_share)
]
Time = Annotated[Duration, _above_zero("4h")]


class Mtbf(Section):
    """How often training fails, by what is lost. Each counts the worse losses too."""

    process_s: Time | None = Field(
        default=None,
        alias="process",
        description="The mean time between failures that end the training, whatever else they take; a time in "
        "the place of the mapping is this one.",
        examples=["4h"],
    )
    node_s: Time | None = Field(
        default=None,
        alias="node",
        description="The mean time between failures that lose a node, with its memory and its disks; absent: each "
        "failure is taken for one.",
        examples=["12h"],
    )
    site_s: Time | None = Field(
        default=None,
        alias="site",
        description="The mean time between failures that lose all that is not in an object store; absent: each that "
        "loses a node is taken for one.",
        examples=["90d"],
    )

    @model_validator(mode="after")
    def _rises(self) -> Self:
        times = [s for s in (self.process_s, self.node_s, self.site_s) if s is not None]
        if not times:
            raise wrong("says no time; expected 4h, or {process: 4h, node: 12h}", expected="4h")
        if times != sorted(times):
            expected = "process at most node, and node at most site"
            raise wrong(
                f"a loss of more comes more often than a loss of less; expected {expected}: who loses a node loses its "
                "processes too",
                expected=expected,
            )
        return self


def _or_none(value: object) -> object:
    return () if value is None else value


def _as_mtbf(value: object) -> object:
    return {"process": value} if isinstance(value, int | float | str) else value


class IntervalSection(Section):
    """When maybe_save saves: by one of every, overhead and mtbf, or a policy that was registered; on_signal and at_end
    come on top."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"additionalProperties": {"type": "object"}}
    )

    every: Every | None = Field(
        default=None,
        description="Save every so many training steps, or every so much time, such as 10m.",
        examples=[100],
    )
    overhead: Overhead | None = Field(
        default=None,
        description="The share of training time that saving may cost: the first steps and saves are measured, and the "
        "interval follows what they cost. The default, 3.5%, where neither every nor mtbf is set.",
        examples=["3.5%"],
    )
    mtbf: Annotated[Mtbf | None, BeforeValidator(_as_mtbf, str | int | float | Mtbf | None)] = (
        Field(
            default=None,
            description="The mean time between failures, to find the interval that loses the least time to saving and "
            "to failures (Young and Daly); a time, or one per loss: {process: 4h, node: 12h, site: 90d}.",
            examples=["4h"],
        )
    )
    on_signal: Annotated[
        tuple[Signal, ...], BeforeValidator(_or_none, tuple[Signal, ...] | None)
    ] = Field(
        default=(),
        description="Signals on which the next maybe_save saves, whatever the interval says.",
        examples=[["SIGTERM"]],
    )
    at_end: Flag = Field(
        default=False,
        description="Whether close saves the last step that maybe_save was given, where it is not saved yet; every "
        "tier gets it.",
        examples=[True],
    )

    @model_validator(mode="before")
    @classmethod
    def _read_registered(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return with_registered(PolicyKind.INTERVAL, value, known_keys(cls))

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        named = [n for n in ("every", "overhead", "mtbf") if getattr(self, n) is not None]
        named += self.model_extra or {}
        if len(named) > 1:
            raise wrong(
                f"{' and '.join(named)} contradict each other; take {named[0]} alone, or leave it out: every is fixed, "
                "overhead follows what saving costs, mtbf what failures cost too",
                expected="one of every, overhead and mtbf",
            )
        return self

    @property
    def every_steps(self) -> int | None:
        """The interval in steps, where it is set so."""
        return self.every if isinstance(self.every, int) else None

    @property
    def every_s(self) -> float | None:
        """The interval in seconds, where it is set so."""
        return self.every if isinstance(self.every, float) else None

    def rule(self) -> Rule | None:
        """Give a policy that was registered as those of kind ``interval`` are asked with it; None where none is."""
        for name, rules in (self.model_extra or {}).items():
            return plugins.rule(PolicyKind.INTERVAL, name, rules)
        return None

    @property
    def budget(self) -> float | None:
        """The share that saving may cost, where that decides, or a policy of somebody else's has no answer."""
        if self.every is not None or self.mtbf is not None:
            return None
        return OVERHEAD if self.overhead is None else self.overhead
