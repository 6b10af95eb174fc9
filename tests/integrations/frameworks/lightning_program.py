"""What a process trains by Lightning that is killed, and started again: ``lightning_program.py main ARGUMENTS`` (JSON).

Each rank logs step, epoch, batch and loss of every batch, as a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import tierfall
from tierfall.integrations.lightning import TierfallIO


class Data(Dataset[torch.Tensor]):
    """Rows that are augmented as they are read: that draws from the random state."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.randn(rows, 16, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + 0.01 * torch.randn(16)


class Module(pl.LightningModule):
    """Dropout draws from the random state, batch normalisation has state that is no parameter."""

    def __init__(
        self,
        log: Path | None = None,
        *,
        sharded: str = "",
        pause_s: float = 0.0,
        waits_at: int = 0,
    ) -> None:
        super().__init__()
        self.log_file, self.sharded, self.pause_s = log, sharded, pause_s
        self.left = waits_at
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64),
            torch.nn.Identity() if sharded else torch.nn.BatchNorm1d(64),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(64, 16),
        )

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if self.sharded == "FSDP2":
            for layer in (self.net[0], self.net[3], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        time.sleep(self.pause_s)
        loss = (self.net(batch) - batch).square().mean()
        if self.log_file is not None:
            with self.log_file.with_suffix(f".{self.global_rank}").open("a") as file:
                where = [self.global_step, self.current_epoch, number]
                file.write(json.dumps([*where, loss.item().hex()]) + "\n")
        self.left -= 1
        if not self.left:
            Event().wait()  # for the kill
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("val_loss", (self.net(batch) - batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def config(folder: Path) -> dict[str, Any]:
    host = {"name": "host", "kind": "host", "folder": str(folder / "memory"), "capacity": "16MiB"}
    disk = {"name": "disk", "kind": "file", "path": str(folder / "disk")}
    return {"run": "lightning", "max_wait": "30s", "tiers": [host, disk]}


def trainer(io: TierfallIO, saves: ModelCheckpoint, **more: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", callbacks=[saves, io], plugins=[io], **quiet, **more)


class SavesAlone(pl.Callback):
    """Makes a call on rank 0 that all ranks should make."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *more: Any) -> None:
        if trainer.global_rank == 0:
            trainer.save_checkpoint("alone.ckpt")


class FailsAlone(pl.Callback):
    """Raises on rank 0 alone, before or after a batch."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_train_batch_start(self, *more: Any) -> None:
        self.fail("start", *more)

    def on_train_batch_end(self, *more: Any) -> None:
        self.fail("end", *more)

    def fail(self, where: str, trainer: pl.Trainer, *more: Any) -> None:
        if trainer.global_rank == 0 and where == self.where:
            raise ValueError("the batch of rank 0 is bad")


class FSDPOnCpu(FSDPStrategy):
    """Lightning refuses FSDPStrategy itself without a GPU, and FSDP the device that it passes."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def die_in_save(number: int) -> None:
    """Let this process be killed as the ``number``th save has begun, before its pointer is written."""
    real, left = tierfall.Checkpointer.save, [number]

    def save(*args: Any, **more: Any) -> Any:
        handle = real(*args, **more)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return handle

    tierfall.Checkpointer.save = save  # type: ignore[method-assign]


def main(
    folder: str,
    log: str,
    ranks: int = 1,
    every: int = 5,
    epochs: int = 3,
    accumulate: int = 1,
    sharded: str = "",
    dies_in: int = 0,
    own_loader: bool = False,
    pause_s: float = 0.0,
    waits_at: int = 0,
    alone: bool = False,
    fails: str = "",
) -> None:
    if dies_in:
        die_in_save(dies_in)
    if ranks > 1:
        os.environ["TORCHELASTIC_RUN_ID"] = "test"  # so Lightning knows torchrun
    torch.set_num_threads(1)
    pl.seed_everything(1)
    root = Path(folder)
    loader = DataLoader if own_loader else StatefulDataLoader
    saves = ModelCheckpoint(
        dirpath=root / "checkpoints", every_n_train_steps=every, save_last=True, save_top_k=-1
    )
    strategy: Any = "auto"
    if ranks > 1:
        strategy = DDPStrategy(process_group_backend="gloo")
    if sharded == "FSDP2":
        strategy = ModelParallelStrategy(
            data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo"
        )
    if sharded == "FSDP1":
        strategy = FSDPOnCpu(process_group_backend="gloo", auto_wrap_policy={torch.nn.Linear})
    made = trainer(
        TierfallIO(config(root) | ({"max_wait": "2s"} if alone or fails else {})),
        saves,
        strategy=strategy,
        devices=ranks,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
    )
    module = Module(root / log, sharded=sharded, pause_s=pause_s, waits_at=waits_at)
    data = Data(64 * ranks)
    if ranks > 1:  # Lightning's own has no state
        rank = int(os.environ["RANK"])
        sampler = StatefulDistributedSampler(data, num_replicas=ranks, rank=rank, seed=5)
        train = loader(data, batch_size=8, sampler=sampler)
    else:
        train = loader(data, batch_size=8, shuffle=True)
    if alone:
        made.callbacks.append(SavesAlone())
    if fails:
        made.callbacks += [FailsAlone(fails), OnExceptionCheckpoint(root / "failed")]
    made.fit(module, train, DataLoader(Data(16), batch_size=8), ckpt_path="last")


if __name__ == "__main__":
    print("ANSWER", json.dumps(main(**json.loads(sys.argv[2]))), flush=True)
