"""A plan as a picture: the ETTR against the interval, for each chain; the rates that tiers need against the size of the
cluster. It needs matplotlib, and is imported only if that is installed."""

from __future__ import annotations

from dataclasses import replace

from matplotlib.figure import Figure

from tierfall.plan.answers import Plan

FACTORS, POINTS = (0.25, 0.5, 1, 2, 4), 60


def draw(plan: Plan) -> Figure:
    """Draw both diagrams, one below the other."""
    figure = Figure(figsize=(9.0, 7.0), dpi=150, layout="constrained")
    above, below = figure.subplots(2)
    for first in range(len(plan.tiers)):
        chain = replace(plan, tiers=plan.tiers[first:])
        low_s = max(plan.step_s, chain.drain_s)
        spread = 1 + (plan.cluster.restart_s + 20 * plan.every_s) / low_s
        times = [low_s * spread ** (n / POINTS) for n in range(POINTS + 1)]
        name = " + ".join(("host", *(tier.name for tier in chain.tiers)))
        above.plot(times, [chain.ettr_at(every_s) for every_s in times], label=name)
    above.axvline(plan.every_s, color="#444444", linestyle="--", label="chosen")
    above.set(xscale="log", xlabel="seconds between saves", ylabel="ETTR")
    # The size of a checkpoint stays, and so does the time of a step, as the batch grows with the cluster.
    scaled = [
        replace(
            plan,
            cluster=replace(
                plan.cluster, mtbf_s={k: s / factor for k, s in plan.cluster.mtbf_s.items()}
            ),
        )
        for factor in FACTORS
    ]
    gpus = [plan.cluster.gpus * factor for factor in FACTORS]
    for index, tier in enumerate(plan.tier_answers):
        rates = [one.tier_answers[index]["required_bytes_per_s"] / 1e9 for one in scaled]
        below.plot(gpus, rates, marker="o", label=f"{tier['name']}: needed")
    below.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="GB/s of all nodes")
    for axes in (above, below):
        axes.legend(frameon=False)
    return figure
