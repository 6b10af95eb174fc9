"""An eviction order: the checkpoint with the highest loss goes first, as in `evict: {order: worst_loss}`."""

import math

from tierfall.policies import register


@register("evict", "worst_loss")
def worst_loss_first(tier, rules, now_s):
    losses = {c.id: c.metrics.get("loss", math.inf) for c in tier.checkpoints}
    worst_first = sorted(losses, key=losses.get, reverse=True)
    return [(id, f"its loss is {losses[id]:g}") for id in worst_first]
