"""A training in Ray, whose workers the test kills: each appends what it does to a file of its own.

Arguments: a folder, the configuration of the tiers, the number of workers, and the names of the runs, one after the
other in one Ray. The stored tier of a run ``away`` fails for a while. Rank 1 of a run ``fails`` raises once. The first
three starts of a run ``killed`` wait at step 38 for their kill. The last line of the output has the folder of each
checkpoint that Ray has of the last run, and its metrics.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model

import tierfall
from tierfall.integrations.ray import report

STEPS, EVERY = 40, 5


def train_function(config: dict[str, Any]) -> None:
    rank = train.get_context().get_world_rank()
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 512), torch.nn.Dropout(0.1), torch.nn.Linear(512, 64)
    model = prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + rank)
    state = {"model": model, "optimizer": optimizer}
    handle = None
    with open(f"{config['folder']}/rank{rank}", "a", buffering=1) as log:
        print(json.dumps(["began", os.getpid()]), file=log)
        starts = Path(log.name).read_text().count("began")
        with tierfall.open(config["tiers"]) as ckpt:
            restored = ckpt.restore(state)
            for step in range(restored.step + 1 if restored else 1, STEPS + 1):
                loss = model(torch.randn(16, 64)).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                print(json.dumps(["loss", step, loss.item().hex()]), file=log)
                time.sleep(0.02)  # a kill is to meet it at work
                if Path(config["folder"]).name == "away" and step in (12, 27):
                    change = move_away if step == 12 else move_back
                    change(Path(config["tiers"]["tiers"][-1]["path"]), handle)
                if Path(config["folder"]).name == "fails" and step == 12 and not restored and rank:
                    raise ValueError("a bad batch")
                if Path(config["folder"]).name == "killed" and step == 38 and starts <= 3:
                    Event().wait()
                if step % EVERY == 0:
                    print(json.dumps(["saves", step]), file=log)
                    handle = ckpt.save(step, state)
                    report(ckpt, handle, {"step": step})


def move_away(tier: Path, handle: Any) -> None:
    """Put a file in the place of a tier's folder, once the tier has what ``handle`` saved."""
    while not handle.done():
        time.sleep(0.01)
    tier.rename(tier.with_suffix(".away"))
    tier.touch()


def move_back(tier: Path, handle: Any) -> None:
    """Put the folder back once the tier counts as one that fails; wait until it has what ``handle`` saved."""
    while handle.exception() is None:
        time.sleep(0.01)
    tier.unlink()
    tier.with_suffix(".away").rename(tier)
    while not handle.done():
        time.sleep(0.01)


def fit(folder: Path, tiers: dict[str, Any], workers: int) -> Any:
    folder.mkdir()
    return TorchTrainer(
        train_function,
        train_loop_config={"folder": str(folder), "tiers": {**tiers, "run": folder.name}},
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(
            name=folder.name,
            storage_path=str(folder / "ray"),
            failure_config=train.FailureConfig(max_failures=10),
        ),
    ).fit()


if __name__ == "__main__":
    folder, tiers, workers, *runs = sys.argv[1:]
    ray.init(num_cpus=int(workers), object_store_memory=100 << 20, include_dashboard=False)
    for run in runs:
        result = fit(Path(folder, run), json.loads(tiers), int(workers))
    assert result.checkpoint == result.best_checkpoints[-1][0]
    print(json.dumps([[one.path, metrics] for one, metrics in result.best_checkpoints]))
