"""What one rank does whose model is sharded by FullyShardedDataParallel, which tierfall refuses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import tierfall
from tests.distributed import program
from tierfall.core.types.errors import TierfallError


def blocks() -> list[nn.Module]:
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2)]


def refused(call: Any) -> str:
    try:
        call()
    except TierfallError as error:
        return str(error)
    return ""


def trouble(folder: str, **changes: Any) -> Any:
    """Save and restore models that are sharded, whole and in part, and then the same ones by FSDP2."""
    dist.init_process_group("gloo")
    cpu = torch.device("cpu")
    whole = FullyShardedDataParallel(nn.Sequential(*blocks()), device_id=cpu, use_orig_params=True)
    partly = nn.Sequential(*blocks())
    partly[1] = FullyShardedDataParallel(partly[1], device_id=cpu)
    sharded = nn.Sequential(*blocks())
    for block in sharded:
        fully_shard(block)
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    said = {}
    with tierfall.open(program.config(folder, run="one", **changes)) as ckpt:
        state = {"model": sharded, "optimizer": optimizer}
        ckpt.save(1, state, block=True)
        for step, name, model in ((2, "whole", whole), (3, "partly", partly)):
            said[f"save {name}"] = refused(
                lambda step=step, model=model: ckpt.save(step, {"model": model})
            )
            said[f"restore {name}"] = refused(lambda model=model: ckpt.restore({"model": model}))
        ckpt.restore(state)
        optimizer.step()
        ckpt.save(4, state, block=True)
        steps = [info.step for info in ckpt.checkpoints()]
    dist.destroy_process_group()
    return {"said": said, "steps": steps}


if __name__ == "__main__":
    program.main(globals())
