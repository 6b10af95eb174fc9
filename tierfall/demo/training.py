"""What the demo trains, and the process that trains it: ``python -m tierfall.demo.training``.

The process is an ordinary user of tierfall. It prints a line of JSON when it is ``ready``, for each ``step``, and when
it has ``ended``; the event log of the run records its checkpoints. Random generators are seeded and one thread
computes, so that two trainings have the same losses, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from contextlib import nullcontext
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tierfall

ENGLISH = "\n".join(topics[name] for name in sorted(topics))
"""Python's help texts, half a million bytes or so."""
TEXT = torch.frombuffer(bytearray(ENGLISH, "utf-8"), dtype=torch.uint8)
BYTES, CONTEXT = 256, 64
WIDTH, LAYERS, HEADS = 192, 3, 4
BATCH = 4
LEARNING_RATE = 1e-3


class Gpt(nn.Module):
    """Predicts the next byte; the output layer is the embedding itself (tied)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of the next byte, (batch, context, 256), for ``text`` of (batch, context)."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.embedding(text) + self.position.weight
        return F.linear(self.layers(x, mask, is_causal=True), self.embedding.weight)


def make_state(steps: int) -> dict[str, Any]:
    """Make what is trained for so many steps: all that a checkpoint is to hold."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1234)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps + 1, cycle_momentum=False
    )
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train_step(state: dict[str, Any]) -> Tensor:
    """Train on a batch of text, drawn by torch's generator, and return its loss."""
    places = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)
    batch = TEXT[places].long()
    logits = state["model"](batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    state["optimizer"].step()  # waits for what a save has not copied yet
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    return loss


def fingerprint(state: dict[str, Any]) -> str:
    """Return a digest of every byte of model and optimizer."""
    digest = hashlib.sha256()
    moments = state["optimizer"].state_dict()["state"]
    for tensors in (state["model"].state_dict(), *moments.values()):
        for name, tensor in tensors.items():
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def report(kind: str, **members: Any) -> None:
    print(json.dumps({"kind": kind, "wall_time_s": time.time(), **members}), flush=True)


def train(*, config: str | None, steps: int, pace_s: float) -> None:
    """Train from what the tiers of ``config`` hold, or from the start, to the last step; without it, save nothing.

    A step that took less than ``pace_s`` is followed by a pause, which is not part of its ``seconds``.
    """
    state = make_state(steps)
    with tierfall.open(config) if config else nullcontext() as ckpt:
        restored = ckpt.restore(state) if ckpt else None
        report("ready", fingerprint=fingerprint(state))
        for step in range(restored.step + 1 if restored else 1, steps + 1):
            began = time.monotonic()
            loss = train_step(state)
            if ckpt:
                ckpt.maybe_save(step, state, metrics={"loss": loss})
            exact = float(loss.item()).hex()
            report("step", step=step, loss=exact, seconds=time.monotonic() - began)
            time.sleep(max(0.0, began + pace_s - time.monotonic()))
        if ckpt:
            ckpt.drain()
        report("ended", fingerprint=fingerprint(state))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(**json.loads(sys.argv[1]))
