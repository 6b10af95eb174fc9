"""Text of messages, and values as JSON members."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from tierfall.core.types.text import members
from tierfall.core.types.values import CheckpointId, LossClass, TierKind


@dataclass(frozen=True, kw_only=True)
class Found:
    id: CheckpointId | None
    started_from: CheckpointId | None = None
    kind: TierKind = TierKind.FILE
    share: float = math.inf
    marks: frozenset[str] = frozenset({"pin", "old"})
    error: Exception | None = None
    path: Path = Path("/there")
    inner: tuple[Found, ...] = ()
    by_class: dict[LossClass, float] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return self.error is None


def test_a_value_is_written_as_members_that_json_has() -> None:
    value = Found(
        id=CheckpointId(400, 7),
        started_from=CheckpointId(300, 6),
        error=ValueError("off"),
        inner=(Found(id=None),),
        by_class={LossClass.NODE: 0.5},
    )
    found = members(value)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    (inner,) = found.pop("inner")
    assert found == {
        "step": 400,
        "attempt": 7,
        "started_from": {"step": 300, "attempt": 6},
        "kind": "file",
        "share": "inf",
        "marks": ["old", "pin"],
        "error": "off",
        "path": "/there",
        "by_class": {"node": 0.5},
    }
    assert [inner[name] for name in ("step", "attempt", "started_from", "error")] == [None] * 4


def test_only_the_named_attributes_are_written_in_their_order() -> None:
    value = Found(id=CheckpointId(400, 7))
    assert [*members(value, "good", "kind", "id").items()] == [
        *(("good", True), ("kind", "file"), ("step", 400), ("attempt", 7))
    ]
    assert members(None, "kind", "id") == {"kind": None, "step": None, "attempt": None}
