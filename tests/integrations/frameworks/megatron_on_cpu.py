"""Megatron-Core on a CPU: what it calls of ``torch.cuda`` is done there."""

from __future__ import annotations

import warnings
from typing import Any

import torch

warnings.filterwarnings("ignore", module=r"megatron\.")
for name in ("current_device", "set_device", "synchronize", "manual_seed"):
    assert hasattr(torch.cuda, name)
on_cpu: Any = torch.cuda
on_cpu.current_device = lambda: torch.device("cpu")
on_cpu.synchronize = lambda *_: None
on_cpu.manual_seed = torch.manual_seed
on_cpu.get_rng_state = lambda *_, **__: torch.get_rng_state()
on_cpu.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]

from megatron.core.tensor_parallel import random  # type: ignore[import-not-found] # noqa: E402

random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
