"""The section ``interval`` of the YAML file: when ``maybe_save`` saves."""

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
    Signal,
    every,
    number_or_text,
    value_error,
)
from tierfall.config.plugins import known_keys, with_registered
from tierfall.config.sections import Section
from tierfall.core.types import units
from tierfall.core.types.policy import PolicyKind, Rule

OVERHEAD = 0.035
"""The default share of training time that saving may cost: CheckFreq's (FAST'21)."""


def _above_zero(example: str) -> AfterValidator:
    def check(value: float) -> float:
        if value <= 0:
            raise value_error(f"0 does not fit; expected more, such as {example}", expected=example)
        return value

    return AfterValidator(check)


def _below_one(value: float) -> float:
    if value >= 1:
        raise value_error(
            "100% leaves no time to train; expected less, such as 3.5%", expected="3.5%"
        )
    return value


def _write_every(value: int | float | None) -> Any:
    """Serialize steps as a number and a time as text, so that the result parses to the same value."""
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
    """How often training fails, by loss class. Each includes the more severe classes."""

    process_s: Time | None = Field(
        default=None,
        alias="process",
        description="The mean time between failures that end the training, whatever else is lost; a time instead of "
        "the mapping is this one.",
        examples=["4h"],
    )
    node_s: Time | None = Field(
        default=None,
        alias="node",
        description="The mean time between failures that lose a node, with its memory and its disks; absent: the same "
        "as process.",
        examples=["12h"],
    )
    site_s: Time | None = Field(
        default=None,
        alias="site",
        description="The mean time between failures that lose all but object stores; absent: the same as node.",
        examples=["90d"],
    )

    @model_validator(mode="after")
    def _increases(self) -> Self:
        times = [s for s in (self.process_s, self.node_s, self.site_s) if s is not None]
        if not times:
            raise value_error(
                "has no time; expected 4h, or {process: 4h, node: 12h}", expected="4h"
            )
        if times != sorted(times):
            expected = "process at most node, and node at most site"
            raise value_error(
                f"a more severe loss occurs more often than a less severe one; expected {expected}: the loss of a "
                "node is also the loss of its processes",
                expected=expected,
            )
        return self


def _or_none(value: object) -> object:
    return () if value is None else value


def _as_mtbf(value: object) -> object:
    return {"process": value} if isinstance(value, int | float | str) else value


class IntervalSection(Section):
    """When maybe_save saves: by one of every, overhead and mtbf, or a registered policy; on_signal and at_end are
    additional."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"additionalProperties": {"type": "object"}}
    )

    every: Every | None = Field(
        default=None,
        description="The interval in training steps, or as a time such as 10m.",
        examples=[100],
    )
    overhead: Overhead | None = Field(
        default=None,
        description="The share of training time that saving may cost: the interval is computed from measured steps and "
        "saves. The default, 3.5%, if neither every nor mtbf is set.",
        examples=["3.5%"],
    )
    mtbf: Annotated[Mtbf | None, BeforeValidator(_as_mtbf, str | int | float | Mtbf | None)] = (
        Field(
            default=None,
            description="The mean time between failures, from which the interval is computed that loses the least time "
            "to saving and to failures (Young and Daly); a time, or one per loss class: {process: 4h, node: 12h, "
            "site: 90d}.",
            examples=["4h"],
        )
    )
    on_signal: Annotated[
        tuple[Signal, ...], BeforeValidator(_or_none, tuple[Signal, ...] | None)
    ] = Field(
        default=(),
        description="Signals after which the next maybe_save saves, whatever the interval.",
        examples=[["SIGTERM"]],
    )
    at_end: Flag = Field(
        default=True,
        description="Whether close saves the last step that maybe_save was called with, if it is not saved yet; every "
        "tier receives it. After an exception it is not saved.",
        examples=[False],
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
            raise value_error(
                f"{' and '.join(named)} cannot stand together; keep one: every (a fixed interval), overhead (from what "
                "saving costs) or mtbf (from what saving and failures cost)",
                expected="one of every, overhead and mtbf",
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
        for name, rules in (self.model_extra or {}).items():
            return plugins.rule(PolicyKind.INTERVAL, name, rules)
        return None

    @property
    def budget(self) -> float | None:
        """The share of training time that saving may cost; None where every or mtbf decides. It also applies where a
        plug-in's policy has no answer."""
        if self.every is not None or self.mtbf is not None:
            return None
        return OVERHEAD if self.overhead is None else self.overhead
