"""One rank of a training by Megatron-Core on the CPU: its GPT model of four layers, trained with AdamW by a loop that
hands activations from stage to stage.

Each rank appends its losses to a file of its own. ``dump`` writes the blocks that a rank has, for comparison.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
import zlib
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.integrations.frameworks import megatron_on_cpu  # noqa: F401

# isort: split
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig
from torch import distributed as dist

import tierfall
from tests.distributed import killing
from tierfall.core.capture.copier import ImageCopier
from tierfall.errors import TierfallError
from tierfall.integrations.megatron import TierLoadStrategy, TierSaveStrategy

VOCABULARY, LENGTH, BATCH, EVERY = 64, 16, 2, 4


def start(tp: int, pp: int, ep: int = 1) -> None:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    torch.manual_seed(1 + parallel_state.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def make_model(tp: int, pp: int, ep: int = 0) -> Any:
    """Make a model; with ``ep`` of experts, over so many ranks."""
    experts = 4 if ep else None
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        **({"num_moe_experts": experts, "expert_model_parallel_size": ep} if experts else {}),
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm", num_experts=experts),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )


class Training:
    """A model, its optimizer, and what Megatron-LM's checkpoints have of them. ``mixed``: the optimizer has copies of
    the weights, as of bf16 ones."""

    def __init__(self, tp: int, pp: int, *, mixed: bool = False) -> None:
        start(tp, pp)
        self.model = make_model(tp, pp)
        self.parameters = [*self.model.parameters()]
        self.main = [p.detach().clone() for p in self.parameters] if mixed else self.parameters
        self.optimizer = torch.optim.AdamW(self.main, lr=1e-2)
        self.step = 0

    def state(self) -> dict[str, Any]:
        """Return the sharded state; an optimizer that has not stepped gets an empty state first."""
        for p in self.main:
            if p not in self.optimizer.state:
                moments = {k: torch.zeros_like(p) for k in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[p] = {"step": torch.zeros(()), **moments}
        model, optimizer = self.model.sharded_state_dict(), self.optimizer.state_dict()
        steps = optimizer["state"][0]["step"]
        by_id = get_param_id_to_sharded_param_map(model, self.parameters)
        optim_state_to_sharding_state(optimizer, by_id, exclude_keys=("step",))
        optimizer["common_step"] = float(steps)
        if self.main is not self.parameters:
            optimizer["main"] = {
                number: make_sharded_optimizer_tensor(
                    by_id[number], p, "optimizer.state.fp32_param"
                )
                for number, p in enumerate(self.main)
            }
        mpu = parallel_state
        of = (
            (
                mpu.get_pipeline_model_parallel_world_size(),
                mpu.get_tensor_model_parallel_world_size(),
            ),
            (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()),
        )
        random = {
            "torch": torch.get_rng_state(),
            "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
        return {
            "model": model,
            "optimizer": optimizer,
            "rng_state": ShardedObject(
                "rng_state", [random], *of, replica_id=mpu.get_data_parallel_rank()
            ),
            "iteration": self.step,
            "args": Namespace(dtype=torch.float32, lr=1e-2),
            "local": LocalNonpersistentObject(os.getpid()),
        }

    def load(self, load: Any, folder: Path, step: int, *, rng: bool = True) -> dict[str, Any]:
        asked = self.state()
        if not rng:
            del asked["rng_state"]
        found: dict[str, Any] = dist_checkpointing.load(
            asked, str(folder / f"iter_{step:07d}"), load, load
        )
        self.model.load_state_dict(found["model"])
        optimizer = found["optimizer"]
        with torch.no_grad():
            for number, whole in optimizer.pop("main", {}).items():
                self.main[number].copy_(whole)
        for each in optimizer["state"].values():
            each["step"] = torch.tensor(optimizer["common_step"])
        self.optimizer.load_state_dict(optimizer)
        self.step = found["iteration"]
        if rng:
            torch.set_rng_state(found["rng_state"][0]["torch"])
            tensor_parallel.get_cuda_rng_tracker().set_states(found["rng_state"][0]["tracker"])
        return found

    def train(self) -> float | None:
        """Make one step; return the loss on the last stage."""
        mpu = parallel_state
        self.step += 1
        drawn = torch.Generator().manual_seed(100 * self.step + mpu.get_data_parallel_rank())
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=drawn)
        positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH), diagonal=1).bool()
        received = None
        if not mpu.is_pipeline_first_stage():
            received = torch.empty(LENGTH, BATCH, 32, requires_grad=True)
            dist.recv(received.data, mpu.get_pipeline_model_parallel_prev_rank())
            self.model.set_input_tensor(received)
        out = self.model(tokens, positions, mask, labels=tokens)
        if mpu.is_pipeline_last_stage():
            out = out.mean()
            out.backward()
        else:
            following = mpu.get_pipeline_model_parallel_next_rank()
            dist.send(out.detach(), following)
            gradient = torch.empty_like(out)
            dist.recv(gradient, following)
            out.backward(gradient)
        if received is not None:
            dist.send(received.grad, mpu.get_pipeline_model_parallel_prev_rank())
        if mpu.get_pipeline_model_parallel_world_size() > 1 and mpu.is_rank_in_embedding_group():
            shared = self.model.shared_embedding_or_output_weight()
            dist.all_reduce(shared.grad, group=mpu.get_embedding_group())
        for p in self.parameters:
            if p.grad is not None:
                dist.all_reduce(p.grad, group=mpu.get_data_parallel_group())
        copies = [(p, m) for p, m in zip(self.parameters, self.main, strict=True) if m is not p]
        for p, main in copies:
            main.grad, p.grad = p.grad, None
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for p, main in copies:
                p.copy_(main)
        return out.item() if mpu.is_pipeline_last_stage() else None


def blocks_of(state: dict[str, Any]) -> list[Any]:
    """Return key, whole shape, offset and copy of each block of a state."""
    sharded, _ = save_preprocess(state, validate_access_integrity=False)
    return [
        (e.key, e.global_shape, e.global_offset, e.prepend_axis_num, e.data.detach().clone())
        for e in nested_values(sharded)
        if isinstance(e, ShardedTensor)
    ]


def known(entry: Any) -> torch.Tensor:
    """Return what a block has in every layout: of a number for its key, and the number of each element in the whole."""
    whole = torch.arange(math.prod(entry.global_shape), dtype=torch.float32)
    return (
        whole.view(entry.global_shape)[entry.global_slice()] + zlib.crc32(entry.key.encode()) % 997
    )


def parts_of(entry: Any) -> list[Any]:
    return [entry] if isinstance(entry, ShardedTensor) else [*nested_values(entry.build())]


class Buckets(DistributedOptimizer):  # type: ignore[misc]
    """The buffers of the distributed optimizer, and how it makes sharded states of them, and loads these. Its other
    parts need a GPU."""

    def __init__(self, model: Any, of_bucket: int) -> None:
        self.model_state = {
            k: e for k, e in model.sharded_state_dict().items() if hasattr(e.data, "grad")
        }
        mpu = parallel_state
        self.data_parallel_group = self.data_parallel_group_gloo = mpu.get_data_parallel_group()
        self.data_parallel_group_idx = mpu.get_model_parallel_group().rank()
        self.distributed_optimizer_instance_id = 0
        self.optimizer = None
        self.states: dict[Any, dict[str, torch.Tensor]] = {}
        parameters, places, buckets, at = [*model.parameters()], {}, [], 0
        for first in range(0, len(parameters), of_bucket):
            begin = end = at
            for parameter in parameters[first : first + of_bucket]:
                begin_of = -(-end // 64) * 64
                end = begin_of + parameter.numel()
                places[parameter] = (begin_of, end, len(buckets))
            at += -(-(end - begin) // 128) * 128
            grads = torch.empty(at - begin)
            buckets.append(
                SimpleNamespace(offset=begin, numel_unpadded=end - begin, grad_data=grads)
            )
        buffer = SimpleNamespace(
            param_index_map=places,
            buckets=buckets,
            numel_unpadded=sum(b.numel_unpadded for b in buckets),
            data_parallel_group=self.data_parallel_group,
            param_dtype=torch.bfloat16,
            grad_dtype=torch.float32,
        )
        self.buffers = [buffer]
        self.gbuf_ranges = [self._build_gbuf_range_map(buffer)]
        self.per_bucket_numel = [{"b": [b.grad_data.numel() for b in buckets]}]
        self.per_bucket_numel_unpadded = [{"b": [b.numel_unpadded for b in buckets]}]
        for entry in self.model_state.values():
            self.states[entry.data] = {
                name: torch.zeros_like(entry.data) for name in ("param", "exp_avg", "exp_avg_sq")
            }

    def is_known(self, *, fill: bool) -> bool:
        """Return whether what this rank owns has the known values; ``fill`` gives everything these first."""
        owned = self.gbuf_ranges[0].values()
        ranges = {p: r["param"] for each in owned for b in each for p, r in b["param_map"].items()}
        equal = []
        for entry in self.model_state.values():
            for name, live in self.states[entry.data].items():
                expected = torch.zeros_like(live)
                for part in parts_of(replace(entry, key=f"{name}.{entry.key}", data=expected)):
                    part.data.copy_(known(part).view(part.data.shape))
                if fill:
                    live.copy_(expected)
                if found := ranges.get(entry.data):
                    at = slice(found.start, found.end)
                    equal.append(torch.equal(live.view(-1)[at], expected.view(-1)[at]))
        return bool(equal) and all(equal)

    def _get_main_param_and_optimizer_states(self, model_param: Any) -> dict[str, torch.Tensor]:
        (owned,) = self.gbuf_ranges[0].values()
        (found,) = (
            b["param_map"][model_param]["param"] for b in owned if model_param in b["param_map"]
        )
        states = self.states[model_param].items()
        return {name: state.view(-1)[found.start : found.end] for name, state in states}

    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: Any) -> None:
        for name, state in self._get_main_param_and_optimizer_states(model_param).items():
            state.copy_(tensors[name])


class Program:
    def __init__(self, folder: Path, memory: str, **more: Any) -> None:
        self.rank, self.folder = int(os.environ["RANK"]), folder
        self.config = {
            "run": "mcore",
            "tiers": [
                {"name": "memory", "kind": "host", "folder": memory, "capacity": "64MiB"},
                {"name": "disk", "kind": "file", "path": str(folder / "disk"), **more},
            ],
            "max_wait": "60s",
        }

    def dump(self, name: str, state: dict[str, Any]) -> None:
        torch.save(blocks_of(state), self.folder / f"{name}-{self.rank}.pt")

    def open(self) -> Any:
        return tierfall.open(self.config, process_group=dist.new_group(backend="gloo"))

    def train(
        self,
        tp: int,
        pp: int,
        life: str,
        steps: int = 12,
        is_async: bool = True,
        rng: bool = True,
        pause_s: float = 0.0,
        waits_at: int = 0,
        point: str = "",
        victim: int = 0,
        mixed: bool = False,
    ) -> Any:
        """Train to ``steps``, saving every fourth, from what the run has; wait after ``waits_at`` for a kill."""
        training, folder = Training(tp, pp, mixed=mixed), self.folder / "checkpoints"
        with self.open() as ckpt:
            save, load, queue = TierSaveStrategy(ckpt), TierLoadStrategy(ckpt), AsyncCallsQueue()
            newest = load.write_folder(folder)
            if newest is not None:
                training.load(load, folder, newest, rng=rng)
                self.dump(f"{life}-loaded", training.state())
            if point and self.rank == victim:
                killing.at_point(point, 1, killing.kill_self)
            lazy = []
            while training.step < steps:
                loss = training.train()
                queue.maybe_finalize_async_calls()
                if loss is not None:
                    with open(self.folder / f"{life}-{self.rank}", "a") as log:
                        print(training.step, float(loss).hex(), file=log)
                if training.step % EVERY == 0:
                    place = folder / f"iter_{training.step:07d}"
                    place.mkdir(parents=True, exist_ok=True)
                    state = training.state()
                    request = dist_checkpointing.save(
                        state, str(place), save, async_sharded_save=is_async
                    )
                    if is_async:
                        queue.schedule_async_request(request)
                    lazy.append(save.handle.stats.lazy_bytes / save.handle.stats.bytes)
                time.sleep(600 if training.step == waits_at else pause_s)
            queue.maybe_finalize_async_calls(blocking=True)
            self.dump(f"{life}-trained", training.state())
            ckpt.drain()
            return {"step": training.step, "newest": newest, "lazy": lazy}

    def values(self, layouts: list[tuple[int, int, int]]) -> Any:
        """Save known values in the first layout, and return which keys have others once loaded in each of the rest."""
        wrong = []
        start(1, 1)
        with self.open() as ckpt:
            save, load = TierSaveStrategy(ckpt), TierLoadStrategy(ckpt)
            load.write_folder(self.folder / "checkpoints")
            place = self.folder / "checkpoints/iter_0000007"
            place.mkdir(parents=True, exist_ok=True)
            for number, (tp, pp, ep) in enumerate(layouts):
                start(tp, pp, max(ep, 1))
                model = make_model(tp, pp, ep)
                state = model.sharded_state_dict()
                entries = [
                    p for e in nested_values(state) if hasattr(e.data, "grad") for p in parts_of(e)
                ]
                with torch.no_grad():
                    for entry in entries:
                        value = known(entry).view(entry.data.shape)
                        entry.data.copy_(torch.zeros_like(value) if number else value)
                state["iteration"] = 7
                if not number:
                    dist_checkpointing.save(state, str(place), save)
                else:
                    dist_checkpointing.load(state, str(place), load, load, strict="raise_all")
                wrong.append(
                    [e.key for e in entries if not torch.equal(e.data, known(e).view(e.data.shape))]
                )
            keys = dist_checkpointing.load_tensors_metadata(str(place), load)
            plain = dist_checkpointing.load_plain_tensors(str(place))
        return {"wrong": wrong, "same": {*keys, "iteration"} == {*plain}}

    def optimizer(self, calls: list[tuple[str, str, int, int, int]]) -> Any:
        """For each call, save or load the state of a distributed optimizer; return if its values are the known ones."""
        start(1, 1)
        answers = []
        with self.open() as ckpt:
            save, load = TierSaveStrategy(ckpt), TierLoadStrategy(ckpt)
            load.write_folder(self.folder / "checkpoints")
            for doing, kind, step, tp, pp in calls:
                start(tp, pp)
                model = make_model(tp, pp)
                buckets = Buckets(model, of_bucket=9 if kind == "dp_reshardable" else 1000)
                buckets.is_known(fill=doing == "save")
                make = getattr(buckets, f"sharded_param_state_{kind}")
                of = {"param_state": make(buckets.model_state, doing == "load", {})}
                state = {"model": model.sharded_state_dict(), "optimizer": of, "iteration": step}
                state["o"] = ShardedObject("o", self.rank, (1,), (0,), replica_id=self.rank)
                place = self.folder / f"checkpoints/iter_{step:07d}"
                place.mkdir(parents=True, exist_ok=True)
                try:
                    if doing == "save":
                        dist_checkpointing.save(state, str(place), save)
                    else:
                        found = dist_checkpointing.load(state, str(place), load, load)
                        read = getattr(buckets, f"load_parameter_state_from_{kind}")
                        read(found["optimizer"]["param_state"])
                        assert found["o"] in (0, self.rank), "its own replica, or the main one"
                    answers.append(buckets.is_known(fill=False))
                except TierfallError as error:
                    answers.append(f"{type(error).__name__}: {error}")
        return {"answers": answers}

    def held_back(self) -> Any:
        """Finalize a save whose capture is held back, change what it captures lazily, and load it."""
        start(1, 1)
        weight = torch.nn.Parameter(torch.arange(1024.0) + 1024 * self.rank)
        optimizer, queue = torch.optim.SGD([weight], lr=1.0), AsyncCallsQueue()
        with self.open() as ckpt:
            save, load = TierSaveStrategy(ckpt), TierLoadStrategy(ckpt)
            load.write_folder(self.folder / "checkpoints")

            def place(step: int) -> str:
                made = self.folder / f"checkpoints/iter_{step:07d}"
                made.mkdir(parents=True, exist_ok=True)
                return str(made)

            def state() -> dict[str, Any]:
                entry = ShardedTensor.from_rank_offsets("w", weight, (0, self.rank, 2))
                return {"w": entry, "iteration": 1}

            def train() -> None:
                weight.grad = torch.ones_like(weight)
                optimizer.step()

            train()
            dist_checkpointing.save(state(), place(1), save)
            train()
            saved, release = weight.detach().clone(), threading.Event()
            killing.at(ImageCopier, "run", 1, lambda: release.wait(20))
            try:
                request = dist_checkpointing.save(state(), place(2), save, async_sharded_save=True)
                queue.schedule_async_request(request)
                finalized = queue.maybe_finalize_async_calls()
                captured = "captured" in repr(save.handle)
                train()
            finally:
                release.set()
            save.handle.captured()
            changed = not torch.equal(weight.detach(), saved)
            dist.barrier()  # all ranks have it
            dist_checkpointing.load(state(), place(2), load, load)
            return {
                "finalized": finalized,
                "captured": captured,
                "lazy": save.handle.stats.lazy_bytes == weight.nbytes,
                "loaded": changed and torch.equal(weight.detach(), saved),
            }

    def refused(self, call: Any, *given: Any) -> str:
        try:
            call(*given)
        except (TierfallError, CheckpointingException) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def refusals(self) -> Any:
        """Return the errors of calls that cannot be met, by what is wrong."""
        start(1, 1)
        found, folder = {}, self.folder / "checkpoints"
        rows = torch.arange(8.0).view(4, 2) + 8 * self.rank

        def state(data: Any = rows, key: str = "a", **more: Any) -> dict[str, Any]:
            entry = ShardedTensor.from_rank_offsets(key, data, (0, self.rank, 2), **more)
            return {"a": entry, "iteration": 3}

        def path(name: str, backend: str = "tierfall") -> str:
            place = folder / name
            place.mkdir(parents=True, exist_ok=True)
            if name != "iter_0000003":
                (place / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
            return str(place)

        def odd() -> dict[str, Any]:
            data = {"f": print} if self.rank else {}
            return {**state(), "o": ShardedObject("o", data, (2,), (self.rank,))}

        def asked(where: str, given: dict[str, Any]) -> str:
            return self.refused(dist_checkpointing.load, given, where, load, load)

        with self.open() as ckpt:
            save, load = TierSaveStrategy(ckpt), TierLoadStrategy(ckpt)
            load.write_folder(folder)
            store = dist_checkpointing.save
            found["no step"] = self.refused(store, state(), path("latest"), save)
            found["unknown object"] = self.refused(store, odd(), path("iter_2"), save)
            store(state(), path("iter_0000003"), save)
            found["no such step"] = asked(path("iter_0000099"), state())
            found["its own format"] = asked(path("iter_0000098", "torch_dist"), state())
            (folder / "latest_checkpointed_iteration.txt").write_text("98")
            found["newer"] = self.refused(load.write_folder, folder)
            found["missing key"] = asked(path("iter_0000003"), state(key="b"))
            found["shape"] = asked(path("iter_0000003"), state(torch.zeros(3, 2)))
            ckpt.save(5, {"other": torch.zeros(1)}).captured()
            found["other"] = asked(path("iter_0000005"), state())
            twins = ShardedTensor.from_rank_offsets("t", rows, replica_id=(0, self.rank, 0))
            store({"t": twins}, path("iter_0000006"), save)
            rows.zero_()
            dist_checkpointing.load({"t": twins}, path("iter_0000006"), load, load)
            found["own"] = rows.flatten().tolist()
            padded = state(torch.ones(6, 2, dtype=torch.bfloat16), allow_shape_mismatch=True)
            dist_checkpointing.load(padded, path("iter_0000003"), load, load)
            return {**found, "padded": padded["a"].data.float().tolist()}


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    where = {"folder": Path(given.pop("folder")), "memory": given.pop("memory")}
    try:
        answer = getattr(Program(**where), sys.argv[1])(**given)
    except Exception as error:  # noqa: BLE001 - the test reads it
        traceback.print_exc()
        answer = {"error": type(error).__name__, "text": str(error)}
    print(f"ANSWER {json.dumps(answer)}", flush=True)
    os._exit(0)
