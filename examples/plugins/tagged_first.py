"""A flush order: tagged checkpoints go to the tier first, as in `flush: {order: tagged_first}`."""

from tierfall.policies import register


@register("flush", "tagged_first")
def tagged_first(tier, rules, now_s):
    ordered = sorted(tier.checkpoints, key=lambda c: (bool(c.tags), c.id), reverse=True)
    return [(c.id, "it is tagged" if c.tags else "it is not tagged") for c in ordered]
