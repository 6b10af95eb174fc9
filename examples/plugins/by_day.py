"""A save interval: saves take 4% of the training by day and 2% at night (UTC), as in `interval: {by_day: true}`."""

import math

from tierfall.policies import register


@register("interval", "by_day")
def by_day(measured, rules, now_s):
    is_day = 8 <= now_s % 86400 / 3600 < 20
    share = 0.04 if is_day else 0.02
    steps = max(1, math.ceil(measured.cost_s / (share * measured.step_s)))
    return steps, f"{share:.0%} of the training, it is {'day' if is_day else 'night'}"
