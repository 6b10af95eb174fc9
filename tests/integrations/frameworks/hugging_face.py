"""One start of a Hugging Face training on tiny random models: what a rank does, and is killed in.

Every loss goes to a file, exactly: ``step``, the number of the micro batch, and the loss as hexadecimal digits.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import tierfall
from tests.distributed import killing
from tierfall.integrations.transformers import attach

VOCABULARY = 64
SAMPLES = 40
LENGTH = 12
STEPS = 14
RANK = int(os.environ.get("RANK", "0"))


def config(folder: Path, memory: str) -> dict[str, Any]:
    return {
        "run": "hugging",
        "max_wait": "20s",
        "tiers": [
            {"name": "host", "kind": "host", "folder": memory, "capacity": "64MiB"},
            {"name": "disk", "kind": "file", "path": str(folder / "disk"), "retain": {"last": 3}},
        ],
    }


def model() -> Any:
    """A model with dropout, and with weights that two modules share."""
    set_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=2 * LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=1,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


def rows() -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, VOCABULARY, (SAMPLES, LENGTH), generator=drawn)
    return [
        {"input_ids": row, "labels": row, "attention_mask": [1] * LENGTH} for row in tokens.tolist()
    ]


def tokenizer() -> Any:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    core = Tokenizer(WordLevel(words, unk_token="w2"))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="w0", eos_token="w1", unk_token="w2"
    )


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def recorded(kind: type, path: Path) -> type:
    """Return the class of a Trainer that writes down each loss."""

    class Recorded(kind):  # type: ignore[misc, valid-type]
        at, micro, waits_at = -1, 0, 0

        def training_step(self, *args: Any, **more: Any) -> Any:
            loss = super().training_step(*args, **more)
            time.sleep(0.02)  # so that a tier keeps up with a save of each step
            step = self.state.global_step + 1
            self.at, self.micro = step, self.micro + 1 if self.at == step else 0
            with path.open("a") as out:
                out.write(f"{step} {self.micro} {loss.item().hex()}\n")
            if step == self.waits_at:
                Event().wait()  # for the kill
            return loss

    return Recorded


def arguments(folder: Path, kind: type = TrainingArguments, **changes: Any) -> Any:
    given = {
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "save_steps": 1,
        "save_strategy": "steps",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return kind(**{**given, **changes})


def plain(
    folder: Path,
    losses: Path,
    callbacks: Any = None,
    compute_metrics: Any = None,
    **changes: Any,
) -> Any:
    """A Trainer: 10 updates an epoch on one rank, 5 on two."""
    return recorded(Trainer, losses)(
        model=model(),
        args=arguments(folder, **changes),
        train_dataset=rows(),
        eval_dataset=rows()[:4],
        data_collator=collate,
        callbacks=callbacks,
        compute_metrics=compute_metrics,
    )


def sharded(folder: Path, losses: Path) -> Any:
    """FSDP2 with activation checkpointing."""
    shard_on_cpu()
    return plain(
        folder,
        losses,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "fsdp_version": 2,
            "activation_checkpointing": True,
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
        },
    )


def shard_on_cpu() -> None:
    """Let accelerate use FSDP on CPUs: it knows that of devices alone."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def on_cpu(self: Any, *_: Any, **__: Any) -> tuple[str, Any]:
        return "gloo", DistributedType.MULTI_GPU

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    torch.distributed.init_process_group("gloo")
    PartialState._prepare_backend = on_cpu
    PartialState.set_device = set_device


def tuned(folder: Path, losses: Path, *, lora: bool) -> Any:
    """TRL's SFTTrainer; with LoRA and gradient checkpointing."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    adapters = LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM")
    return recorded(SFTTrainer, losses)(
        model=model(),
        args=arguments(folder, SFTConfig, gradient_checkpointing=lora, max_length=LENGTH),
        train_dataset=dataset(rows()),
        processing_class=tokenizer(),
        peft_config=adapters if lora else None,
    )


def dataset(found: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(found)


def preferred(folder: Path, losses: Path) -> Any:
    """TRL's DPOTrainer, whose reference model follows the model."""
    from trl import DPOConfig, DPOTrainer

    texts = [
        {"prompt": f"w{n + 3} w{n + 4}", "chosen": f" w{n + 5} w{n + 6}", "rejected": f" w{n + 7}"}
        for n in range(SAMPLES)
    ]
    return recorded(DPOTrainer, losses)(
        model=model(),
        ref_model=model(),
        args=arguments(
            folder,
            DPOConfig,
            max_length=LENGTH,
            sync_ref_model=True,
            ref_model_sync_steps=1,
            disable_dropout=False,
        ),
        train_dataset=dataset(texts),
        processing_class=tokenizer(),
    )


def rewarded(folder: Path, losses: Path) -> Any:
    """TRL's GRPOTrainer: it samples from the model."""
    from trl import GRPOConfig, GRPOTrainer

    prompts = [{"prompt": f"w{n + 3} w{n + 4}"} for n in range(SAMPLES)]

    def short(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    return recorded(GRPOTrainer, losses)(
        model=model(),
        reward_funcs=short,
        args=arguments(folder, GRPOConfig, num_generations=2, max_completion_length=4, max_steps=8),
        train_dataset=dataset(prompts),
        processing_class=tokenizer(),
    )


def damage(folder: Path, memory: Path, step: int, rank: int = 0) -> None:
    """Change a bit of a rank's image of a step on the tier of files, and delete what is in memory."""
    for run in memory.glob("*"):
        shutil.rmtree(run)
    (image,) = folder.rglob(f"step-{step:08}-*/rank-{rank:05}-of-*.safetensors")
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 1
    image.write_bytes(data)


class SavesAlone(TrainerCallback):
    """Requests a save on rank 0 that all ranks should make."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_save = RANK == 0


KINDS = {
    "trainer": plain,
    "alone": lambda *a: plain(*a, callbacks=[SavesAlone()], save_strategy="no"),
    "fsdp": sharded,
    "sft": lambda *a: tuned(*a, lora=False),
    "lora": lambda *a: tuned(*a, lora=True),
    "dpo": preferred,
    "grpo": rewarded,
}


def train(
    folder: str,
    memory: str,
    kind: str,
    life: str,
    step: int | None = None,
    point: str = "",
    call: int = 1,
    victim: int = 0,
    waits_at: int = 0,
) -> dict[str, Any]:
    """Train to the end, from what is there; or die at a call of a point of tierfall."""
    if point and victim == RANK:
        killing.at_point(point, call, killing.kill_self)
    root = Path(folder)
    trainer = KINDS[kind](root, root / f"{life}-{RANK}")
    trainer.waits_at = waits_at
    with tierfall.open(
        config(root, memory) | ({"max_wait": "2s"} if kind == "alone" else {})
    ) as ckpt:
        extra = {"ref_model": trainer.ref_model} if kind == "dpo" else {}
        found = attach(trainer, ckpt, step=step, extra=extra)
        trainer.train(resume_from_checkpoint=found)
        counts = ckpt.statistics()
    return {
        "resumed": found and int(found.rpartition("-")[2]),
        "saves": counts.saves,
        "lazy": counts.lazy_saves,
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(threadName)s %(message)s")
    print("ANSWER " + json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
