"""The command: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import (
    adapters,
    in_flight,
    machine,
    memory,
    objects,
    peer_memory,
    plots,
    report,
    small,
    training,
    yielding,
)
from benchmarks.figures import Results, exit_code
from benchmarks.gpu import part as gpu
from benchmarks.peers import measure as peers
from benchmarks.peers import registry
from benchmarks.plan import Plan
from benchmarks.suite import Suite
from tierfall.tiers.host_folder import SHARED_MEMORY

FILE_PARTS = ("durable", "host", "cold", "warm")
PARTS = (
    *FILE_PARTS,
    "memory",
    "objects",
    "throttled",
    "peers",
    "training",
    "small",
    "in_flight",
    "yielding",
    "peer_memory",
    "adapters",
    "gpu",
)
MORE_PARTS = {
    "peers": peers.measure,
    "training": training.measure,
    "small": small.measure,
    "in_flight": in_flight.measure,
    "yielding": yielding.measure,
    "peer_memory": peer_memory.measure,
    "adapters": adapters.measure,
    "gpu": gpu.measure,
}
EPILOGUE = (
    "exit codes: 0: every target is met (or --report-only), 1: one is missed, "
    "2: the file tier ran buffered I/O where the reference ran direct"
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks", description=__doc__, epilog=EPILOGUE)
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="on which file system (default: .)"
    )
    parser.add_argument("--size-gib", type=float, default=1.5, help="of the state (default: 1.5)")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=registry.KEYS,
        default=registry.KEYS,
        help="of the part peers",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order within each round")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the state lies: cpu or cuda"
    )
    parser.add_argument(
        "--parameters",
        type=count,
        default=1_000_000_000,
        help="of the model of the part gpu, 12 bytes of state each (default: 1e9)",
    )
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks.json"))
    parser.add_argument("--report-only", action="store_true", help="exit 0 on missed targets")
    parsed = parser.parse_args(arguments)
    if parsed.rounds < 1 or parsed.size_gib <= 0:
        parser.error("--rounds and --size-gib must be above zero")
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    return parsed


def count(text: str) -> int:
    """Read a number above zero that may be written as 1e9."""
    try:
        number = int(float(text))
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero, such as 1e9")
    return number


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and clean up
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="tierfall-bench-", dir=options.dir)).resolve()
    shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    host = Path(tempfile.mkdtemp(prefix="tierfall-bench-", dir=shared))
    plan = Plan(
        folder=folder,
        memory=host,
        file_system=machine.file_system(folder),
        size_bytes=int(options.size_gib * 2**30),
        rounds=options.rounds,
        seed=options.seed,
        only=frozenset(options.only),
        device=options.device,
        systems=frozenset(options.systems),
        parameters=options.parameters,
    )
    try:
        about = machine.describe(folder, host, options.device)
        results = run(plan)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(host, ignore_errors=True)
    print(report.table(results, about))
    command = shlex.join(["python", "-m", "benchmarks", *arguments])
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report.as_json(results, about, command), indent=1) + "\n")
    print(f"all samples: {options.json}")
    if plots.available():
        for path in plots.write(results, options.json):
            print(f"plot: {path}")
    else:
        print(plots.MISSING)
    return exit_code(results, report_only=options.report_only)


def run(plan: Plan) -> Results:
    """Measure what takes the large state first, and let it go before the process of its own starts."""
    before = machine.load()
    if before > 0.3 * torch.get_num_threads():
        say(f"others are at work on this machine (load {before:.1f}): expect wider spreads")
    results = Results()
    if plan.only & {*FILE_PARTS, "memory"}:
        results = run_suite(plan)
    objects.measure(plan, say, results)
    for part, measure in MORE_PARTS.items():
        if part in plan.only:
            gc.collect()
            measure(plan, say, results)
    results.facts.update(load_before=before, load_after=machine.load())
    if "memory" in plan.only:
        say("memory: saves and restores in a process of their own")
        shutil.rmtree(plan.folder / "tier", ignore_errors=True)
        results.memory = memory.measure_apart(plan)
    return results


def run_suite(plan: Plan) -> Results:
    suite = Suite(plan, say)
    gc.collect()
    gc.freeze()
    try:
        return suite.run()
    finally:
        del suite
        gc.unfreeze()
        gc.collect()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
