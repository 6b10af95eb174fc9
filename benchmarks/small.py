"""Many small tensors: what each of them costs a save, beyond its bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn
from torch.optim import Optimizer

import tierfall
from benchmarks import bare
from benchmarks.chain import FILE
from benchmarks.figures import Results, over_rounds, ratio
from benchmarks.peers.measure import place_of
from benchmarks.peers.ours import TIER, keeping_one
from benchmarks.plan import Plan
from benchmarks.rounds import Contender, Figures, run_rounds

COUNT = 10_000
ITEMS = 2_560
"""fp32: 10 KiB a tensor."""
TARGET = 1.6
CHECKS = ("off", "sample")
COPIED_S = 0.5
"""After so long an image is complete, and its barrier has come by nobody else."""
CHECK_TARGET_US = 2.0


def measure(plan: Plan, say: Callable[[str], None], results: Results) -> None:
    """Save 10,000 tensors of 10 KiB, beside one copy and one write of as many bytes."""
    say(f"small: {COUNT} tensors of {ITEMS * 4 >> 10} KiB, and one buffer of as many bytes")
    direct = bare.direct_works(plan.folder, plan.file_system)
    place = place_of(plan, "small", direct=direct)
    model = nn.ParameterList(torch.randn(ITEMS, device=plan.device) for _ in range(COUNT))
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    one = torch.randn(COUNT * ITEMS, device=plan.device)
    buffer = bare.Buffer([one], touched=True)
    path = place.folder / "reference.bin"

    def write_bare() -> None:
        buffer.take([one])
        bare.write_file(path, buffer.view, direct=direct)

    with tierfall.open(keeping_one(place, TIER, "small")) as ckpt:
        step = 0

        def make_room() -> None:
            nonlocal step
            if step:
                ckpt.delete(step, even_the_last=True)
                ckpt.drain()
            optimizer.step()
            step += 1

        def save() -> Figures:
            began = time.perf_counter()
            handle = ckpt.save(step, state)
            blocked = time.perf_counter() - began
            handle.wait(FILE)
            if step > 1 and not handle.stats.lazy:
                raise AssertionError("the save captured blocking; a lazy one was to be measured")
            return {"blocked": blocked}

        contenders = [
            Contender(name="small.tierfall", before=make_room, timed=save),
            Contender(name="small.reference", timed=write_bare, after=path.unlink),
        ]
        found = run_rounds(contenders, rounds=plan.rounds, seed=plan.seed, say=say)
    results.samples.update(found)
    results.facts["small_state_bytes"] = one.nbytes
    results.ratios.append(
        ratio(
            "10,000 tensors of 10 KiB, durable",
            found,
            subject="small.tierfall",
            reference="small.reference",
            target=TARGET,
        )
    )
    each = [seconds / COUNT * 1e6 for seconds in found["small.tierfall/blocked"]]
    results.findings.append(over_rounds("save() blocks for each of them", each, unit="us"))
    _measure_checks(plan, say, results, state, optimizer)


def _measure_checks(
    plan: Plan,
    say: Callable[[str], None],
    results: Results,
    state: dict[str, object],
    optimizer: Optimizer,
) -> None:
    """Save the same tensors with the check of the image and without, and come to the barrier when all is copied."""
    say("small: the same with capture.verify sample and off, up to the barrier")
    direct = bare.direct_works(plan.folder, plan.file_system)
    with ExitStack() as opened:
        contenders = []
        for verify in CHECKS:
            name = f"small.{verify}"
            place = place_of(plan, name, direct=direct)
            config = {**keeping_one(place, TIER, "host"), "capture": {"verify": verify}}
            ckpt = opened.enter_context(tierfall.open(config))
            contenders.append(_until_barrier(name, ckpt, state, optimizer))
        found = run_rounds(contenders, rounds=plan.rounds, seed=plan.seed, say=say)
    results.samples.update(found)
    for what, series, target in (
        ("save() blocks for each", "blocked", None),
        ("the barrier's check takes for each", "barrier", CHECK_TARGET_US),
    ):
        for verify in CHECKS:
            each = [seconds / COUNT * 1e6 for seconds in found[f"small.{verify}/{series}"]]
            results.findings.append(
                over_rounds(
                    f"{what}, verify: {verify}",
                    each,
                    unit="us",
                    target=target if verify == "sample" else None,
                )
            )


def _until_barrier(
    name: str, ckpt: tierfall.Checkpointer, state: dict[str, object], optimizer: Optimizer
) -> Contender:
    step = 0

    def make_room() -> None:
        nonlocal step
        if step:
            ckpt.delete(step, even_the_last=True)
            ckpt.drain()
        optimizer.step()
        step += 1

    def save() -> Figures:
        began = time.perf_counter()
        handle = ckpt.save(step, state)
        blocked = time.perf_counter() - began
        time.sleep(COPIED_S)
        began = time.perf_counter()
        ckpt.wait_captured()
        barrier = time.perf_counter() - began
        handle.wait(FILE)
        return {"blocked": blocked, "barrier": barrier}

    return Contender(name=name, before=make_room, timed=save)
