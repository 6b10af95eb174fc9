"""What a run found, for people as a table and for programs as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks import side_by_side
from benchmarks.figures import MEMORY_TARGET_BYTES, MIB, Finding, Ratio, Results, spread

GIB = 1 << 30
NAME_WIDTH = 42


def as_json(results: Results, machine: dict[str, Any], command: str) -> dict[str, Any]:
    """Everything: each sample, each ratio with its verdict, the machine and its versions."""
    return {
        "format": 1,
        "command": command,
        "machine": machine,
        "facts": results.facts,
        "direct_io": results.direct,
        "ratios": [{**asdict(each), "met": each.met} for each in results.ratios],
        "findings": [{**asdict(each), "met": each.met} for each in results.findings],
        "memory": results.memory and {**results.memory, "met": results.memory_met},
        "samples_s": results.samples,
    }


def table(results: Results, machine: dict[str, Any]) -> str:
    """A table to read: ratios with their targets first, then the seconds behind them."""
    lines = [*_heading(results, machine), ""]
    lines.append(f"{'ratio':<{NAME_WIDTH}}{'median':>8}{'of rounds':>17}{'target':>9}  verdict")
    lines += [ratio_line(each) for each in results.ratios]
    if results.memory is not None:
        lines.append(_memory_line(results))
    lines += [finding_line(each) for each in results.findings]
    lines += [*side_by_side.systems(results), *side_by_side.training(results)]
    lines += ["", f"{'seconds':<{NAME_WIDTH}}{'median':>8}{'least to most':>17}{'GB/s':>9}"]
    for name, values in results.samples.items():
        if side_by_side.is_in_tables(name):
            continue
        one = spread(values)
        moved = _bytes_moved(name, results.facts)
        rate = "" if "/" in name else f"{moved / one.median / 1e9:9.2f}"
        lines.append(
            f"{name:<{NAME_WIDTH}}{one.median:8.4f}{one.low:9.4f} - {one.high:<6.4f}{rate.rjust(8)}"
        )
    if results.direct:
        lines += ["", _io_line(results)]
    return "\n".join(lines)


def _heading(results: Results, machine: dict[str, Any]) -> list[str]:
    facts = results.facts
    lines = [
        f"machine: {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads of torch "
        f"{machine['torch']}, state on {machine['device']}",
        f"files: {machine['folder']}; host tier: {machine['memory_folder']}; load before and after: "
        f"{facts['load_before']:.1f}, {facts['load_after']:.1f}",
    ]
    if "state_bytes" in facts:
        lines += [
            f"state: {facts['state_bytes'] / GIB:.2f} GiB in {facts['tensors']} tensors, "
            f"{facts['parameters'] / 1e6:.0f} M parameters, fp32 with AdamW",
            f"first save (reserves memory): returned after {facts['first_save_blocked_s']:.2f} s, "
            f"durable after {facts['first_save_s']:.2f} s",
        ]
    if "object_state_bytes" in facts:
        lines.append(
            f"object store: SeaweedFS on this machine, {facts['object_state_bytes'] / MIB:.0f} MiB of state"
        )
    if "throttled_state_bytes" in facts:
        lines.append(f"slow folder: {facts['throttled_state_bytes'] / MIB:.0f} MiB of bf16 weights")
    if "training_state_bytes" in facts:
        lines.append(
            f"training: {facts['training_parameters'] / 1e6:.0f} M parameters, "
            f"{facts['training_state_bytes'] / GIB:.2f} GiB of state"
        )
    if "gpu_state_bytes" in facts:
        lines.append(
            f"gpu: {facts['gpu_parameters'] / 1e9:.2f} billion parameters in fp32 with AdamW, "
            f"{facts['gpu_state_bytes'] / GIB:.2f} GiB in {facts['gpu_tensors']} tensors; "
            f"{facts['gpu_batches']} batches a step"
        )
    lines += facts.get("gpu_left_out", [])
    return lines


def _bytes_moved(series: str, facts: dict[str, Any]) -> int:
    """How many bytes of state a sample of a series moved."""
    kinds = {
        "upload": "object_state_bytes",
        "download": "downloaded_state_bytes",
        "throttled": "throttled_state_bytes",
        "small": "small_state_bytes",
        "gpu": "gpu_state_bytes",
        "peer_memory": "peer_memory_state_bytes",
    }
    return int(facts[kinds.get(series.partition(".")[0], "state_bytes")])


def ratio_line(each: Ratio) -> str:
    target = "" if each.target is None else f"<= {each.target:.2f}"
    return (
        f"{each.name:<{NAME_WIDTH}}{each.value:8.3f}{each.low:9.3f} - {each.high:<5.3f}{target:>9}"
        f"  {_verdict(each.met)}"
    )


def finding_line(each: Finding) -> str:
    target = "" if each.target is None else f"<= {each.target:.2f}"
    about = " ".join(word for word in (each.unit, _verdict(each.met)) if word)
    return (
        f"{each.name:<{NAME_WIDTH}}{each.value:8.3f}{each.low:9.3f} - {each.high:<5.3f}{target:>9}"
        f"  {about} ({each.interval})"
    )


def _memory_line(results: Results) -> str:
    assert results.memory is not None
    extra = f"{results.memory['extra_bytes'] / MIB:.0f} MiB"
    target = f"<= {MEMORY_TARGET_BYTES / MIB:.0f}"
    name = "peak RssAnon beyond the import"
    return f"{name:<{NAME_WIDTH}}{extra:>8}{'':>17}{target:>9}  {_verdict(results.memory_met)}"


def _verdict(met: bool | None) -> str:
    return {None: "reported", True: "met", False: "MISSED"}[met]


def _io_line(results: Results) -> str:
    path = {True: "direct", False: "buffered"}
    what = ", ".join(f"{who} {path[direct]}" for who, direct in results.direct.items())
    if results.comparable:
        return f"I/O: {what}"
    return f"I/O: {what}: NOT COMPARABLE, the file tier went through the page cache and the reference around it"
