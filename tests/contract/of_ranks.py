"""What one rank does in the tests of ranks and of peer memory: functions that a ``Crew`` calls by name.

Each gets the rank, and what the test passes. A node's memory and disk are folders with its number.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tierfall
from tests.contract.kit import equal
from tierfall.errors import TierfallError
from tierfall.integrations.dcp import LazyStager, TierReader, TierWriter

torch.set_num_threads(1)
held: dict[str, Any] = {}
"""What a rank keeps from one call to the next."""


def config(folder: str, node: str = "", **words: Any) -> dict[str, Any]:
    """Host memory, ``nvme`` of the node, and ``pfs`` that all nodes see; with ``peers`` peer memory in place of
    ``nvme``."""
    root, node = Path(folder), node or os.environ.get("GROUP_RANK", "0")
    host = {"name": "host", "kind": "host", "folder": str(root / f"memory-{node}")}
    nvme = {"name": "nvme", "kind": "file", "path": str(root / f"nvme-{node}"), "shared": False}
    peers = {"name": "peers", "kind": "peer", "path": str(root / f"peers-{node}")}
    pfs = {"name": "pfs", "kind": "file", "path": str(root / "pfs"), "shared": True}
    near = peers | words.pop("peers") if "peers" in words else nvme | words.pop("nvme", {})
    return {
        "run": "run",
        "max_wait": "20s",
        "chunk": "64KiB",
        "tiers": [host | words.pop("host", {}), near, pfs | words.pop("pfs", {})],
        **words,
    }


def own(rank: int, step: int) -> dict[str, Any]:
    """A state that differs from rank to rank and from step to step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        "weights": {f"w{i}": torch.randn(100 + rank, 50, generator=generator) for i in range(2)},
        "step": torch.full((1,), float(step)),
        "extra": {"step": step, "rank": rank},
        "rng": None,
    }


def outcome(handle: tierfall.SaveHandle, tier: str | None = None) -> list[str]:
    """What became of a save, and why it failed."""
    try:
        handle.wait(tier, 30)
    except TierfallError as error:
        return ["failed", str(error)]
    return ["saved", ""]


# One checkpoint, or none ------------------------------------------------------------------------------


def go_on(
    rank: int, folder: str, steps: Sequence[int] = (), wait: Sequence[str] = ("pfs",), **words: Any
) -> dict[str, Any]:
    """Continue from where the run is, save these steps, and close; with ``members`` these ranks alone, with ``domains``
    in the failure domain of the rank."""
    members, domains = words.pop("members", None), words.pop("domains", None)
    group = None if members is None else dist.new_group(list(members))
    if members is not None and rank not in members:
        return {}
    if domains and domains[rank]:
        os.environ["TIERFALL_DOMAIN"] = domains[rank]
    try:
        with tierfall.open(config(folder, **words), process_group=group) as ckpt:
            state = own(rank, 0)
            report = ckpt.restore(state)
            found: dict[str, Any] = {"step": None if report is None else report.step}
            if report is not None:
                found["good"] = equal(state, own(rank, report.step))
                found["tiers"] = sorted({source.tier for source in report.sources})
                found["fallbacks"] = [f"{one.what}: {one.reason}" for one in report.fallbacks]
            for step in steps:
                handle = ckpt.save(step, own(rank, step))
                for tier in wait or ("host",):
                    handle.captured(30) if tier == "host" else handle.wait(tier, 30)
            found["known"] = [[c.step, c.attempt, sorted(c.copies)] for c in ckpt.checkpoints()]
            survival = ckpt.statistics().peer_survival
            found["survives"] = None if survival is None else asdict(survival)
            return found
    finally:
        os.environ.pop("TIERFALL_DOMAIN", None)


def lose_disk(rank: int, folder: str, loser: int, lost: str, **words: Any) -> None:
    """Restore, and close; before that the ``loser`` finds that the disk of its node is gone."""
    with tierfall.open(config(folder, **words)) as ckpt:
        ckpt.restore(own(rank, 0))
        if rank == loser:
            shutil.rmtree(lost)
            Path(lost).touch()


def stay(rank: int, folder: str, steps: Sequence[int], wait: str = "", **words: Any) -> None:
    """Open, save these steps, and stay open; wait for a tier, or for this rank's memory."""
    ckpt = held["ckpt"] = tierfall.open(config(folder, **words))
    ckpt.restore(own(rank, 0))
    for step in steps:
        held["handle"] = ckpt.save(step, own(rank, step))
        held["handle"].wait(wait, 30) if wait else held["handle"].captured(30)
    while not all(any(c.step == s and c.copies for c in ckpt.checkpoints()) for s in steps):
        time.sleep(0.01)


def leave(rank: int) -> None:
    held.pop("ckpt").close()


def alone(rank: int, folder: str, only: int) -> list[Any]:
    """One rank saves step 1, which the others do not; all save the steps after that."""
    with tierfall.open(config(folder, max_wait="1s")) as ckpt:
        first = outcome(ckpt.save(1, own(rank, 1)), "pfs") if rank == only else None
        dist.barrier()
        later = [outcome(ckpt.save(step, own(rank, step)), "pfs")[0] for step in (2, 3, 4)]
        return [first, later]


def unsavable(rank: int, folder: str, bad: int) -> list[Any]:
    """The state of one rank cannot be saved at step 1; all save step 2."""
    with tierfall.open(config(folder)) as ckpt:
        state = own(rank, 1)
        if rank == bad:
            state["extra"]["function"] = unsavable
        try:
            first = outcome(ckpt.save(1, state), "pfs")
        except TierfallError as error:
            first = ["raised", str(error)]
        return [first, outcome(ckpt.save(2, own(rank, 2)), "pfs")[0]]


def copies(rank: int, folder: str, step: int, in_the_way: str) -> list[list[str]]:
    """Save a step while a folder is in the way of a file; what became of its copy on each tier."""
    with tierfall.open(config(folder, max_wait="2s")) as ckpt:
        ckpt.restore(own(rank, 0))
        if rank == 0:
            Path(in_the_way, "folder").mkdir(parents=True)
        dist.barrier()
        handle = ckpt.save(step, own(rank, step))
        return [outcome(handle, tier) for tier in ("nvme", "pfs")]


def misfit(rank: int, folder: str, bad: int) -> None:
    """Restore, one rank into a state of another shape."""
    with tierfall.open(config(folder)) as ckpt:
        state = own(rank, 0)
        if rank == bad:
            state["step"] = torch.zeros(2)
        ckpt.restore(state)


def fails(rank: int, folder: str, last: Sequence[int]) -> float:
    """Save up to step ``last`` of this rank; then the training fails. How many seconds the close takes."""
    began = 0.0
    try:
        with tierfall.open(config(folder, interval={"every": 1}, max_wait="60s")) as ckpt:
            ckpt.restore(own(rank, 0))
            for step in range(1, last[rank] + 1):
                ckpt.maybe_save(step, own(rank, step))
                ckpt.wait_captured()
            dist.barrier()
            began = time.monotonic()
            raise ZeroDivisionError
    except ZeroDivisionError:
        return time.monotonic() - began


def cadence(
    rank: int, folder: str, interval: dict[str, Any], until: int, step_s: float
) -> list[int]:
    """Train so many steps in step with each other; which of them were saved."""
    saved = []
    with tierfall.open(config(folder, interval=interval)) as ckpt:
        for step in range(1, until + 1):
            time.sleep(step_s)
            dist.barrier()
            handle = ckpt.maybe_save(step, own(rank, step))
            if handle is not None:
                saved.append(handle.step)
    return saved


def save_timed(rank: int, step: int) -> list[Any]:
    """Save a step of the open run: seconds until ``save`` returned, and whether a wait of half a second ended by its
    timeout."""
    began = time.monotonic()
    held["handle"] = held["ckpt"].save(step, own(rank, step))
    took = time.monotonic() - began
    try:
        held["handle"].wait("pfs", 0.5)
    except TimeoutError:
        return [took, True]
    return [took, False]


def wait_and_leave(rank: int) -> list[str]:
    found = outcome(held.pop("handle"), "pfs")
    leave(rank)
    return found


def save_expecting_nothing(rank: int, step: int) -> str:
    """Save a step of the open run until it raises; the name of the class that came."""
    try:
        for number in range(step, step + 50):
            held["ckpt"].save(number, own(rank, number)).wait("pfs", 10)
    except (TierfallError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with suppress(TierfallError):
            leave(rank)
    return ""


# Commands ----------------------------------------------------------------------------------------------


def commands(rank: int, folder: str) -> dict[str, Any]:
    """Pin, prune, unpin, delete and drain, as all ranks do; what each returned, and what is known after each."""
    known: dict[str, Any] = {}
    with tierfall.open(config(folder, nvme={"retain": {"last": 1}})) as ckpt:
        ckpt.restore(own(rank, 0))

        def note(what: str) -> None:
            found = ckpt.checkpoints()
            stored = [[c.step, c.pinned, sorted({*c.copies} - {"host"})] for c in found]
            known[what] = [one for one in stored if one[2]]

        ckpt.save(1, own(rank, 1), block=True)
        ckpt.pin(1)
        for step in (2, 3):
            ckpt.save(step, own(rank, step), block=True)
        note("pinned")
        decisions = ckpt.prune()
        known["prune"] = sorted([d.checkpoint.step, d.tier, d.verdict] for d in decisions)
        ckpt.unpin(1)
        ckpt.prune()
        note("unpinned")
        ckpt.delete(2)
        note("deleted")
        ckpt.save(4, own(rank, 4))
        report = ckpt.drain(30)
        known["drain"] = [sorted(map(list, part)) for part in (report.done, report.left)]
    return known


def commands_that_differ(rank: int, folder: str) -> list[Any]:
    """Each rank pins another step; then one rank alone unpins; then all pin the same."""
    with tierfall.open(config(folder, max_wait="1s")) as ckpt:
        for step in (1, 2):
            ckpt.save(step, own(rank, step), block=True)
        dist.barrier()
        found = [_refused(lambda: ckpt.pin(1 + rank % 2))]
        dist.barrier()
        found.append([[c.step for c in ckpt.checkpoints() if c.pinned]])
        dist.barrier()
        found.append(_refused(lambda: ckpt.unpin(1)) if rank == 0 else [])
        dist.barrier()
        ckpt.pin(2)
        found.append([[c.step for c in ckpt.checkpoints() if c.pinned]])
        return found


def _refused(call: Any) -> list[str]:
    try:
        call()
    except TierfallError as error:
        return [type(error).__name__, str(error)]
    return []


# Models that ranks hold together ----------------------------------------------------------------------


def model_of(layout: str, group: Any, world_size: int) -> nn.Module:
    """Two layers whose rows no number of ranks divides, laid out as ``layout`` says."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 26), nn.ReLU(), nn.Linear(26, 10))
    if layout in ("fsdp", "tp"):
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        _shard(model, mesh) if layout == "fsdp" else _cut(model, mesh)
    if layout == "hsdp":
        names = ("replicate", "shard")
        _shard(model, init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names))
    if layout == "tp-fsdp":
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        _cut(model, mesh["tp"])
        _shard(model, mesh["dp"])
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=group)
    return model


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _cut(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def train_model(
    rank: int, folder: str, layout: str, until: int, members: Sequence[int], saves: bool = True
) -> Any:
    """The ranks ``members`` train a model until a step, and return a digest of the whole of it with its optimizer."""
    group = dist.new_group(list(members))
    if rank not in members:
        return None
    model = model_of(layout, group, len(members))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tierfall.open(config(folder), process_group=group) as ckpt:
        mine = tierfall.item(100 + rank, on_resize="per_rank")
        state = {"model": model, "optimizer": optimizer, "own": mine}
        report = ckpt.restore(state)
        first = report.step + 1 if report else 1
        restored = digest_of_training(model, optimizer) if report else ""
        for step in range(first, until + 1):
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if saves:
                handle = ckpt.save(step, state)
        if saves and first <= until:
            handle.wait("pfs", 30)
        return {
            "first": first,
            "restored": restored,
            "digest": digest_of_training(model, optimizer),
            "lazy": ckpt.statistics().lazy_saves,
            "own": state["own"].value,
        }


def digest_of_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors: list[Any] = list(model.parameters())
    for parameter in list(tensors):
        moments = optimizer.state[parameter]
        tensors += [moments["step"], moments["exp_avg"], moments["exp_avg_sq"]]
    found = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


def digest_of(loaded: dict[str, Any]) -> str:
    """The same digest of what ``tierfall.load`` returned."""
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    optimizer = loaded["optimizer"]
    moments = [optimizer["state"][key] for key in optimizer["param_groups"][0]["params"]]
    found = hashlib.sha256()
    for tensor in [loaded["model"][name] for name in names]:
        found.update(tensor.numpy().tobytes())
    for each in moments:
        for part in ("step", "exp_avg", "exp_avg_sq"):
            found.update(each[part].numpy().tobytes())
    return found.hexdigest()


def load_model(rank: int, folder: str) -> list[Any]:
    """Load the newest step as a dict, without continuing from it."""
    with tierfall.open(config(folder)) as ckpt:
        found = ckpt.load(resume=False)
        assert found is not None
        report, loaded = found
        return [report.step, digest_of(loaded), loaded["own"]]


def train_by_dcp(
    rank: int,
    folder: str,
    until: int,
    members: Sequence[int],
    lazily: bool = False,
    layout: str = "fsdp",
) -> Any:
    """The same training, whose loop saves and loads by ``torch.distributed.checkpoint``."""
    training, group = dist.new_group(list(members)), dist.new_group(list(members))
    if rank not in members:
        return None
    model = model_of(layout, training, len(members))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tierfall.open(config(folder), process_group=group) as ckpt:
        stager, future, first, restored = LazyStager(ckpt), None, 1, ""
        if ckpt.checkpoints():
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": moments, "extra": {"step": 0}}
            dcp.load(state, storage_reader=TierReader(ckpt), process_group=group)
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )
            first, restored = state["extra"]["step"] + 1, digest_of_training(model, optimizer)
        for step in range(first, until + 1):
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if future is not None:
                future.result(30)
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": moments, "extra": {"step": step}}
            words: Any = {
                "storage_writer": TierWriter(ckpt, step=step, until="pfs"),
                "process_group": group,
            }
            if lazily:
                future = dcp.async_save(state, async_stager=stager, **words)
            else:
                dcp.save(state, **words)
        if future is not None:
            future.result(30)
        return {
            "first": first,
            "restored": restored,
            "digest": digest_of_training(model, optimizer),
            "lazy": ckpt.statistics().lazy_saves,
        }


def save_by_torch_alone(rank: int, path: str) -> str:
    """Train a sharded model for a step, and save it as a DCP folder of torch's own; the digest of the whole."""
    world_size = dist.get_world_size()
    model = model_of("fsdp", dist.new_group(list(range(world_size))), world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(8, 16)).square().mean().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "epoch": 3}, checkpoint_id=path)
    return digest_of_training(model, optimizer)


def restore_in_one_process(config: dict[str, Any], run: str) -> list[Any]:
    """The digest of what a run has, restored without any other rank; and its epoch."""
    model = model_of("plain", None, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    with tierfall.open(config, run=run) as ckpt:
        assert ckpt.restore(state) is not None
    return [digest_of_training(model, optimizer), state["epoch"]]


class Tied(nn.Module):
    """A head that is the embedding, and a buffer of the rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(200, 64)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 200, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.full((4,), float(rank)))


def _replica(rank: int) -> dict[str, Any]:
    model = Tied(rank)
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.body(model.embedding(torch.arange(50)))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    stage = nn.Linear(4, 4)
    with torch.no_grad():
        stage.weight.fill_(rank // 2)
        stage.bias.fill_(rank // 2)
    extra = {"epoch": 3}
    return {"model": model, "optimizer": optimizer, "extra": extra, f"stage{rank // 2}": stage}


def replicas(rank: int, folder: str, steps: Sequence[int], differ_at: int = 0) -> list[Any]:
    """Save models that are replicas of each other; at ``differ_at`` rank 2 has changed a row of its own."""
    state = _replica(rank)
    found = []
    with tierfall.open(config(folder)) as ckpt:
        for step in steps:
            if step == differ_at and rank == 2:
                with torch.no_grad():
                    state["model"].body.weight.add_(1)
            found.append(outcome(ckpt.save(step, state), "pfs"))
    return found


def replicas_again(rank: int, folder: str, step: int, changed: bool) -> list[Any]:
    """Restore them into fresh models: whether each has its own back, and the tie holds."""
    expected, state = _replica(rank), _replica(rank)
    if changed and rank == 2:
        with torch.no_grad():
            expected["model"].body.weight.add_(1)
    with torch.no_grad():
        for tensor in (*state["model"].parameters(), *state["model"].buffers()):
            tensor.fill_(-1)
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
    with tierfall.open(config(folder)) as ckpt:
        report = ckpt.restore(state, step=step)
        assert report is not None
    model = state["model"]
    good = equal(dict(model.state_dict()), dict(expected["model"].state_dict()))
    moments = equal(state["optimizer"].state_dict(), expected["optimizer"].state_dict())
    return [report.step, good and moments, model.head.weight is model.embedding.weight]


def refused_states(rank: int, folder: str) -> list[list[str]]:
    """Save what no checkpoint can hold: sums that are not summed up yet, and a model in FSDP1."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    fsdp1 = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with tierfall.open(config(folder)) as ckpt:
        return [
            _refused(lambda: ckpt.save(1, {"partial": partial})),
            _refused(lambda: ckpt.save(2, {"wrapped": fsdp1})),
        ]


# Blocks that the caller places -----------------------------------------------------------------------------

WHOLE = torch.arange(60.0).view(10, 6)


def places(layout: str, rank: int, ranks: int) -> list[tuple[slice, slice]]:
    """The rows and columns of ``WHOLE`` that a rank has."""
    every = slice(0, 10), slice(0, 6)
    share, column = slice(10 * rank // ranks, 10 * (rank + 1) // ranks), rank % 2
    match layout:
        case "rows":
            return [(share, every[1])]
        case "columns":  # the last of four has none
            wide = -(-6 // ranks)
            return [(every[0], slice(min(6, rank * wide), min(6, (rank + 1) * wide)))]
        case "grid":
            half = rank // 2
            return [(slice(4 * half, 4 + 6 * half), slice(5 * column, 5 + column))]
        case "pairs":
            return places("rows", rank // 2, ranks // 2)
        case "layers":
            return [(slice(at, at + 1), every[1]) for at in range(rank, 10, ranks)]
        case "odd" | "left out":
            return places("rows", rank // 2, ranks // 2) if rank % 2 else []
        case "gap":
            return places("layers", rank, ranks)[:2]
        case "overlap":  # as many elements as the whole has
            return [(slice((0, 3, 3, 4)[rank], (3, 5, 6, 6)[rank]), every[1])]
    return [every]


def blocks_of(layout: str, rank: int, ranks: int, whole: torch.Tensor) -> dict[str, Any]:
    """A state with the parts of a tensor that a rank has, some with gaps in their memory."""
    made = {}
    for name, tensor in (("w", whole), ("half", (whole / 3).bfloat16())):
        if layout in ("plain", "dtensor"):
            mesh = init_device_mesh("cpu", (ranks,)) if layout == "dtensor" else None
            plain = tensor.clone()
            made[name] = plain if mesh is None else distribute_tensor(plain, mesh, [Shard(1)])
            continue
        own = places(layout, rank, ranks)
        parts = [tensor[place].t().clone().t() for place in own]
        at = [(rows.start, columns.start) for rows, columns in own]
        if own or layout != "left out":
            one = len(own) == 1
            parts, at = (parts[0], at[0]) if one else (parts, at)  # type: ignore[assignment]
            made[name] = tierfall.block(parts, shape=tensor.shape, offset=at)
    return {"deep": {"seed": 5, **made}}


def memory_of(state: Any) -> list[torch.Tensor]:
    found: list[Any] = []
    for value in [value for name, value in state["deep"].items() if name != "seed"]:
        held = isinstance(value, torch.Tensor)
        found += [value] if held else [tensor for tensor, _ in value.parts]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found]


def blocks(rank: int, folder: str, layout: str, members: Sequence[int], saves: bool = False) -> Any:
    """Save a tensor in blocks, twice; or restore it in another layout: whether each rank has its part of it."""
    group = dist.new_group(list(members))
    if rank not in members:
        return None
    with tierfall.open(config(folder), process_group=group) as ckpt:
        place = members.index(rank), len(members)
        expected = blocks_of(layout, *place, WHOLE + (rank if layout == "own" else 0))
        if saves:
            return [outcome(ckpt.save(step, expected), "pfs") for step in (1, 2)]
        state = blocks_of(layout, *place, torch.full_like(WHOLE, -1))
        lacking = [f"deep.{name}" for name in ("w", "half") if name not in state["deep"]]
        said = _refused(lambda: ckpt.restore(state, skip=lacking))
        if said:
            blank = blocks_of(layout, *place, torch.full_like(WHOLE, -1))
            return [*said, equal(memory_of(state), memory_of(blank))]
        return equal(memory_of(state), memory_of(expected))


def blocks_that_train(rank: int, folder: str, steps: int, by_dcp: bool) -> Any:
    """Train rows of a weight, which two ranks have, with their moments; how many saves were lazy."""
    at = 5 * (rank // 2)
    weight = nn.Parameter(WHOLE[at : at + 5].clone())
    optimizer, group = torch.optim.AdamW([weight], lr=0.1), dist.new_group(range(4))
    with tierfall.open(config(folder), process_group=group) as ckpt:
        stager, saved = LazyStager(ckpt), None
        for step in range(1, steps + 1):
            (weight**2).sum().backward()
            optimizer.step()
            if saved is not None:
                saved.result(30)
            moments = [optimizer.state[weight][key] for key in ("exp_avg", "exp_avg_sq")]
            blocks = [
                tierfall.block(each, shape=WHOLE.shape, offset=(at, 0))
                for each in (weight, *moments)
            ]
            state = dict(zip(("weight", "exp_avg", "exp_avg_sq"), blocks, strict=True))
            if by_dcp:
                writer = TierWriter(ckpt, step=step, until="pfs")
                words: Any = {"storage_writer": writer, "async_stager": stager}
                saved = dcp.async_save(state, process_group=group, **words)
            else:
                handle = ckpt.save(step, state)
        optimizer.step()
        handle.wait("pfs", 30) if saved is None else saved.result(30)
        return ckpt.statistics().lazy_saves


def values_beside_blocks(rank: int, folder: str) -> bool:
    """Save mappings in which some ranks have tensors, and restore them while a tensor gets another layout."""

    def state(layout: str, value: int) -> dict[str, Any]:
        some = {"rank": value, "t": torch.full((3,), float(value))}, {"rank": value, "mine": 7}
        return blocks_of(layout, rank, 4, WHOLE) | {"x": some[rank > 0], "y": some[rank == 0]}

    with tierfall.open(config(folder)) as ckpt:
        ckpt.save(1, state("rows", rank), block=True)
        found = state("columns", -1)
        ckpt.restore(found)
    expected = state("columns", rank)
    return all(equal(found[name], expected[name]) for name in ("x", "y"))


# Values, when the number of ranks changes ---------------------------------------------------------------


def values(rank: int, folder: str, members: Sequence[int], saves: bool) -> Any:
    """Save values of each rank, or restore them into others."""
    group = dist.new_group(list(members))
    if rank not in members:
        return None
    base = 100 if saves else 0
    state = {
        "same": 7 if saves else 0,
        "per_rank": tierfall.item(base + rank, on_resize="per_rank"),
        "replicate": tierfall.item(base + rank, on_resize="replicate"),
        "drop": tierfall.item(base + rank, on_resize="drop"),
    }
    with tierfall.open(config(folder), process_group=group) as ckpt:
        if saves:
            torch.manual_seed(rank)
            ckpt.save(1, state, block=True)
            return torch.rand(1).item()
        torch.manual_seed(77)
        ckpt.restore(state)
        found = [getattr(value, "value", value) for value in state.values()]
        return [*found, torch.rand(1).item()]


def values_that_differ(rank: int, folder: str, members: Sequence[int], saves: bool) -> Any:
    """The same with a value, and a tensor, that no wrapper speaks of."""
    group = dist.new_group(list(members))
    if rank not in members:
        return None
    state = {"position": 100 + rank if saves else -1, "w": torch.full((3,), float(rank))}
    with tierfall.open(config(folder), process_group=group) as ckpt:
        if saves:
            ckpt.save(1, state, block=True)
            return None
        said = _refused(lambda: ckpt.restore(state))
        return [*said[1:], state["position"], state["w"][0].item()]


def gone_bad(rank: int, folder: str, steps: Sequence[int], bad: int, on: int) -> list[Any]:
    """Restore, and save these steps to the disks of the nodes alone; step ``bad`` has NaN on one rank."""
    with tierfall.open(config(folder, pfs={"flush": {"every": 100}})) as ckpt:
        model = nn.Linear(8, 8)
        state = {f"part{rank}": model}
        report = ckpt.restore(state)
        for step in steps:
            if step == bad and rank == on:
                model.weight.data.fill_(float("nan"))
            ckpt.save(step, state).wait("nvme", 30)
        noted = {str(info.step): list(info.not_finite) for info in ckpt.checkpoints()}
        return [None if report is None else report.step, noted]
