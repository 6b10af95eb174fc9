"""The sections ``retain`` and ``evict`` of a stored tier, with registered rules and orders.

A key that the section does not have is the name of a registered policy (``tierfall.config.plugins``); its value is
validated by that policy's own model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from tierfall.config import plugins
from tierfall.config.fields import (
    Count,
    Share,
    Wait,
    any_word,
    choice,
    show,
    value_error,
)
from tierfall.config.plugins import (
    ORDER_SCHEMA,
    known_keys,
    order_rule,
    read_order,
    with_registered,
)
from tierfall.config.sections import Section
from tierfall.core.types import keys, units
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.policy import PolicyKind, Rule
from tierfall.core.types.values import Direction
from tierfall.policies.retention import BestRule as BestRules
from tierfall.policies.retention import EveryRule, TagsRule

_EXPECTED_EVERY = "a whole number of steps such as 1000, or a time with its unit such as 1d"
_EXPECTED_TAGS = "true for any tag, or a list of tags such as [release]"


def _every(value: object) -> int | str:
    """Parse steps to a number; a time remains text, so that it serializes as a time."""
    number = int(value) if isinstance(value, str) and _is_digits(value) else value
    if isinstance(number, int) and not isinstance(number, bool) and number >= 1:
        return number
    if isinstance(value, str) and not _is_digits(value) and value.strip()[-1:].isalpha():
        try:
            seconds = units.parse_duration(value)
        except ConfigError as error:
            raise value_error(str(error), expected=_EXPECTED_EVERY) from None
        if seconds > 0:
            return value
    raise value_error(
        f"{show(value)} does not fit; expected {_EXPECTED_EVERY}", expected=_EXPECTED_EVERY
    )


def _is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _tags(value: object) -> object:
    if value is True or value == "true":
        return True
    if isinstance(value, list | tuple) and value and all(isinstance(tag, str) for tag in value):
        try:
            return tuple(keys.check_name(tag, what="tag") for tag in value)
        except ConfigError as error:
            raise value_error(str(error), expected=_EXPECTED_TAGS) from None
    raise value_error(
        f"{show(value)} does not fit; expected {_EXPECTED_TAGS}", expected=_EXPECTED_TAGS
    )


EveryKept = Annotated[
    int | str,
    BeforeValidator(_every),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": rf"^{units.NUMBER_PATTERN} ?(ms|s|m|h|d)$"},
            ]
        }
    ),
]
TagsKept = Annotated[
    bool | tuple[str, ...],
    BeforeValidator(_tags),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": True},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ]
        }
    ),
]


Watermark = Annotated[Share, PlainSerializer(lambda share: f"{share * 100:.12g}%")]


class BestSection(Section):
    """The best checkpoints by a metric."""

    metric: str = Field(
        description="The name of the metric, as it is passed to save.", examples=["loss"]
    )
    mode: Annotated[Direction, choice(Direction), any_word(Direction)] = Field(
        default=Direction.MIN,
        description="Whether the least is the best, or the greatest.",
        examples=["max"],
    )
    count: Count = Field(default=1, description="How many to keep.", examples=[2])


class RetainSection(Section):
    """Which checkpoints a tier keeps: those that any of these rules keeps. Pinned ones and the newest are kept in any
    case. Other keys are registered rules."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"additionalProperties": {"type": "object"}}
    )

    last: Count | None = Field(
        default=None,
        description="Keep the newest N.",
        examples=[3],
    )
    every: EveryKept | None = Field(
        default=None,
        description="Keep the first at or after each multiple of N training steps; or, with a time such as 1d, the "
        "first of each such period in UTC.",
        examples=[1000, "1d"],
    )
    best: BestSection | None = Field(
        default=None,
        description="Keep the best by a metric.",
        examples=[{"metric": "loss", "mode": "min", "count": 2}],
    )
    for_s: Wait | None = Field(
        default=None,
        alias="for",
        description="Keep what was saved less than this time ago.",
        examples=["30d"],
    )
    tags: TagsKept | None = Field(
        default=None,
        description="Keep what has one of these tags; true: any tag.",
        examples=[["release"], True],
    )

    @model_validator(mode="before")
    @classmethod
    def _read_registered(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return with_registered(PolicyKind.RETAIN, value, known_keys(cls))

    def rules(self) -> tuple[Rule, ...]:
        """Return the configured rules, each bound to its policy of kind ``retain``."""
        configured: dict[str, Any] = {
            "last": self.last,
            "every": None if self.every is None else _as_every(self.every),
            "best": None
            if self.best is None
            else BestRules(metric=self.best.metric, mode=self.best.mode, count=self.best.count),
            "for": self.for_s,
            "tags": None
            if self.tags is None
            else TagsRule(names=() if isinstance(self.tags, bool) else self.tags),
        }
        built_in = [
            plugins.rule(PolicyKind.RETAIN, name, rules)
            for name, rules in configured.items()
            if rules is not None
        ]
        registered = [
            plugins.rule(PolicyKind.RETAIN, name, rules)
            for name, rules in (self.model_extra or {}).items()
        ]
        return (*built_in, *registered)


def _as_every(every: int | str) -> EveryRule:
    if isinstance(every, int):
        return EveryRule(steps=every)
    return EveryRule(period_s=units.parse_duration(every))


class EvictSection(Section):
    """What a tier deletes if its capacity is short: first what no rule of retain keeps."""

    high: Watermark | None = Field(
        default=None,
        description="The share of the capacity above which copies are deleted; absent: only if there is no room.",
        examples=["90%"],
    )
    low: Watermark | None = Field(
        default=None,
        description="The share of the capacity down to which they are deleted then; absent: as high.",
        examples=["80%"],
    )
    order: Annotated[
        dict[str, Any] | None,
        BeforeValidator(lambda value: read_order(PolicyKind.EVICT, value)),
        ORDER_SCHEMA,
    ] = Field(
        default=None,
        description="What is deleted first. cheapest (the default): what another tier stores as safely and restores "
        "fastest; then the oldest. oldest: the oldest. Or a registered order.",
        examples=["oldest"],
    )

    @model_validator(mode="after")
    def _check_watermarks(self) -> Self:
        expected = "{high: 90%, low: 80%}"
        if self.low is not None and self.high is None:
            raise value_error(
                f"low has no effect without high; expected {expected}", expected=expected
            )
        if self.high == 0 or (self.low is not None and self.low > (self.high or 0)):
            raise value_error(
                f"high must be above 0%, and low no higher; expected {expected}", expected=expected
            )
        return self

    def rule(self) -> Rule | None:
        """Return the order as a rule of kind ``evict``; None for the default."""
        return order_rule(PolicyKind.EVICT, self.order)
