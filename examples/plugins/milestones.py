"""A retention rule: keep the first step at or after each power of a base, as in `retain: {milestones: 3}`."""

from pydantic import conint

from tierfall.policies import register


@register("retain", "milestones", rules=conint(ge=2))
def keep_milestones(tier, base, now_s):
    kept, power = {}, 1
    for checkpoint in tier.checkpoints:
        while checkpoint.id.step >= power:
            kept[checkpoint.id] = f"the first at or after {power}"
            power *= base
    return kept
