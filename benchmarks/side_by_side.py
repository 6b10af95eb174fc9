"""Tables of one line a system: what a save and a load take, and what whole training runs do."""

from __future__ import annotations

from benchmarks.figures import MIB, Results, spread
from benchmarks.peers.alone import PREFIX, series
from benchmarks.peers.memory import ANONYMOUS, SHARED

COLUMNS = ("step/call", "step/held", "save", "cold", "warm")
HEADINGS = ("call returns, s", "training held, s", "durable, s", "cold load, s", "warm load, s")
TRAINING = "training"
GIB = 1 << 30


def systems(results: Results) -> list[str]:
    """Seconds of each system, the least and the most in brackets, the memory that its saves take, and what becomes of
    a bit that changes on disk."""
    names = results.facts.get("systems")
    if names is None:
        return []
    sizes = [results.facts[key] / GIB for key in ("peers_state_bytes", "memory_state_bytes")]
    lines = [
        "",
        f"{sizes[0]:.2f} GiB by each system; memory beyond the training, with {sizes[1]:.2f} GiB",
    ]
    lines += [f"{'system':<30}" + "".join(f"{each:>21}" for each in HEADINGS)]
    lines[-1] += f"{'anonymous':>12}{'shared':>10}  a load after one bit changed"
    for key, name in names.items():
        cells = [_cell(results.samples[series(key, what)]) for what in COLUMNS]
        memory = results.facts["systems_memory"][key]
        taken = f"{_mib(memory[ANONYMOUS]):>12}{_mib(memory[SHARED]):>10}"
        damage = results.facts["systems_damage"][key]
        taken += f"  {damage['outcome']} {damage['error']}".rstrip()
        lines.append(f"{name:<30}" + "".join(f"{cell:>21}" for cell in cells) + taken)
    missing = results.facts["systems_missing"]
    return [*lines, missing] if missing else lines


def training(results: Results) -> list[str]:
    """Seconds of whole runs, by who saved and how often."""
    runs = [name for name in results.samples if name.startswith(f"{TRAINING}.")]
    if not runs:
        return []
    lines = ["", f"{'training run of ten steps':<48}{'seconds':>21}"]
    for name in runs:
        lines.append(f"{name.partition('.')[2]:<48}{_cell(results.samples[name]):>21}")
    return lines


def is_in_tables(series_name: str) -> bool:
    """Return whether a series stands in one of these tables."""
    return series_name.partition(".")[0] in (PREFIX, TRAINING)


def _cell(values: list[float]) -> str:
    one = spread(values)
    return f"{one.median:.3f} ({one.low:.2f}-{one.high:.2f})"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f} MiB"
