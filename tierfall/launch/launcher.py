"""The rank of this process, as its launcher sets it: torchrun, SLURM, or torch.distributed."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from tierfall.config import Config
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.ranks.rendezvous import RankPlacement, connect
from tierfall.core.types.errors import ConfigError, RanksError
from tierfall.core.types.text import with_article

_OF_A_NODE = {"path", "url", "options", "folder", "domains"}
"""Keys of a tier that may differ between nodes."""


def find_ranks(config: Config, *, process_group: Any = None, meeting: str = "") -> Ranks:
    """Connect to the other ranks of this job; a process without others is a job of one rank. Several groups of a run
    may meet at the same time, each in a ``meeting`` of another name.

    The ranks are those of the process group; without one, those of ``torch.distributed`` where it is initialised; else
    those that torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GROUP_RANK) or SLURM's srun (SLURM_PROCID,
    SLURM_NTASKS, SLURM_NODEID) set in the environment. Raises ConfigError where these are invalid or name no address,
    RanksError where the other ranks do not connect within ``max_wait``.
    """
    rank, world_size = _rank_and_size(process_group)
    if world_size == 1:
        return Ranks.alone()
    if not hasattr(TCPStore, "queue_push"):
        raise ConfigError(
            f"open: the stores of torch {torch.__version__} have no queues, which ranks exchange messages by: install "
            "a newer torch (2.13 was tried)"
        )
    place = RankPlacement(
        rank=rank,
        world_size=world_size,
        node=_node(),
        address=_address(rank),
        settings=_settings(config),
    )
    return Ranks.join(place, _bootstrap(), run=config.run + meeting, timeout_s=config.max_wait_s)


def _rank_and_size(process_group: Any) -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank(process_group)
        if rank < 0:
            raise ConfigError("open: this process is not in the process_group that it was given")
        return rank, distributed.get_world_size(process_group)
    if process_group is not None and "distributed" not in type(process_group).__module__:
        kind = with_article(type(process_group).__name__)
        raise ConfigError(
            f"open: process_group is {kind}; expected a group of torch.distributed, or None"
        )
    if process_group is not None:
        raise ConfigError(
            "open: process_group is given, but torch.distributed is not initialised; call init_process_group() first"
        )
    names = _launcher_variables()
    return (0, 1) if names is None else _numbers(*names)


def _launcher_variables() -> tuple[str, str] | None:
    """Return the variables with the rank and the number of ranks; None in a process of its own."""
    if "WORLD_SIZE" in os.environ:
        return "RANK", "WORLD_SIZE"
    # A batch script has the same variables for what srun will start: only a job step has ranks.
    if "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:
        return "SLURM_PROCID", "SLURM_NTASKS"
    return None


def _numbers(rank_name: str, size_name: str) -> tuple[int, int]:
    size = _number(size_name)
    rank = _number(rank_name) if size != 1 else 0
    if rank >= size:
        raise ConfigError(
            f"open: {rank_name} is {rank} and {size_name} is {size} in the environment: ranks are counted from 0"
        )
    return rank, size


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"open: {name} is {text!r} in the environment, expected a number")
    return int(text)


def _node() -> str:
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        if name in os.environ:
            return os.environ[name]
    return socket.gethostname()


def _address(rank: int) -> str:
    """Return the address at which other ranks reach this process, if it is rank 0.

    Only the job's rank 0 is known to be at MASTER_ADDR; that of a process group may be another process.
    """
    distributed = torch.distributed
    first = distributed.get_rank() if distributed.is_initialized() else rank
    if first == 0 and "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    return socket.gethostname()


def _settings(config: Config) -> dict[str, str]:
    """Return the settings that must be equal on all ranks. Folders, addresses and secrets may differ between nodes."""
    chain = ", ".join(f"{tier.name} ({tier.kind})" for tier in config.chain)
    settings = {"the chain of tiers": chain, "chunk": str(config.chunk_bytes)}
    for tier in config.chain:
        values = tier.model_dump(mode="json", by_alias=True, exclude=_OF_A_NODE)
        for key, value in values.items():
            settings[f"{key} of tier {tier.name}"] = json.dumps(value, sort_keys=True, default=str)
    return settings


def _no_address() -> str:
    _, size = _launcher_variables() or ("", "WORLD_SIZE")
    alone = "unset it" if size == "WORLD_SIZE" else "unset SLURM_STEP_ID, or start it by srun -n 1"
    return (
        f"open: there are other ranks, but no address to connect to them: {size} is {os.environ.get(size)} in the "
        "environment, and MASTER_ADDR and MASTER_PORT name no address. Start by torchrun, or call "
        f"torch.distributed.init_process_group first; if this process trains alone, {alone}"
    )


def _bootstrap() -> Store:
    """Return a store that all ranks of the job share already."""
    distributed = torch.distributed
    if distributed.is_initialized():
        return distributed.distributed_c10d._get_default_store()
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if address is None or not port.isdecimal():
        raise ConfigError(_no_address())
    try:
        return connect(address, int(port))
    except (OSError, RuntimeError) as error:
        raise RanksError(
            f"open: no store answers at {address}:{port} (MASTER_ADDR, MASTER_PORT): start by torchrun, or call "
            f"torch.distributed.init_process_group first: {error}"
        ) from error
