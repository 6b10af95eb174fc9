"""Train a model that is sharded over several ranks and may be killed at any moment; continue with any number of ranks.

torchrun --nproc-per-node 4 examples/fsdp2.py    # kill it, and start it again, for example with 2
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tierfall


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)
    )
    mesh = init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),)
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the data of a step."""
    seed = step * dist.get_world_size() + dist.get_rank()
    x = torch.rand(64, 2, generator=torch.Generator().manual_seed(seed)) * 4 - 2
    return x, torch.sin(x[:, :1]) * torch.cos(x[:, 1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=Path(__file__).with_name("tiers.yaml"))
    parser.add_argument("--run", default="fsdp2")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with tierfall.open(options.config, run=options.run) as ckpt:
        state = {"model": model, "optimizer": optimizer}
        report = ckpt.restore(state)  # saved by any number of ranks; None at the first start
        if report and dist.get_rank() == 0:
            print(f"restored step {report.step} in {report.seconds:.3f} s", flush=True)
        for step in range(report.step + 1 if report else 1, options.steps + 1):
            x, y = (tensor.to(device) for tensor in batch(step))
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()  # waits only for what is not yet captured
            optimizer.zero_grad()
            ckpt.maybe_save(step, state)  # saves if due; returns at once; no rank waits for another
            if step % 100 == 0 and dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
