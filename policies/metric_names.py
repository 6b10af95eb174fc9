"""Metrics that a rule of retention goes by and that no checkpoint has: mostly a name that is spelt in two ways.

Pure: (view) -> what to say of each. It is no error: whoever saves may give the metric later.
"""

from __future__ import annotations

from tierfall.core.view import View
from tierfall.core.words import few_of, nearest
from tierfall.policies.retain_rules import Best


def missing_metrics(view: View, *, saves_min: int = 1) -> dict[str, str]:
    """Say of each metric of a ``best`` that none of the checkpoints has what they have in its place.

    Where none has any metric, it is said once so many saves were made; what is only being captured does not count.
    """
    asked: dict[str, list[str]] = {}
    for tier in view.tiers:
        for rule in tier.retain:
            if isinstance(rule.rules, Best):
                asked.setdefault(rule.rules.metric, []).append(tier.name)
    whole = [c for c in view.checkpoints if any(map(c.readable_on, c.copies))] if asked else []
    given = sorted({name for checkpoint in whole for name in checkpoint.metrics})
    if not given and max((c.ordinal for c in whole), default=0) < saves_min:
        return {}
    return {
        metric: _said(metric, tiers, given)
        for metric, tiers in asked.items()
        if metric not in given
    }


def _said(metric: str, tiers: list[str], given: list[str]) -> str:
    said = (
        f'retain.best of {", ".join(tiers)} keeps nothing: no checkpoint has the metric "{metric}"'
    )
    if not given:
        return f"{said}, nor any other; save takes them as metrics={{...}}"
    return f"{said}; they have {few_of(given)}{nearest(metric, given)}"
