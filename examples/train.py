"""Train a small model that may be killed at any moment. Started again, it continues where it was.

python examples/train.py            # press Ctrl-C, or kill -9 it, and start it again
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import tierfall


class Data:
    """A loader that saves its position: any object with state_dict and load_state_dict can be in a checkpoint."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.position = 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed + self.position)
        self.position += 1
        x = torch.rand(64, 2, generator=generator) * 4 - 2
        return x, torch.sin(x[:, :1]) * torch.cos(x[:, 1:])

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.position = state["seed"], state["position"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=Path(__file__).with_name("tiers.yaml"))
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    data = Data()

    with tierfall.open(options.config) as ckpt:
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
        report = ckpt.restore(state)  # restores the random state too; None at the first start
        if report:
            tiers = ", ".join(source.tier for source in report.sources)
            print(f"restored step {report.step} from {tiers} in {report.seconds:.3f} s", flush=True)
        for step in range(report.step + 1 if report else 1, options.steps + 1):
            x, y = data.next_batch()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()  # waits only for what is not yet captured
            optimizer.zero_grad()
            scheduler.step()
            ckpt.maybe_save(step, state, metrics={"loss": loss})  # saves if due; returns at once
            print(f"step {step} loss {loss.item()}", flush=True)


if __name__ == "__main__":
    main()
