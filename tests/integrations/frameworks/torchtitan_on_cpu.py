"""Import this first, and TorchTitan runs without a GPU.

It replaces what TorchTitan calls of one: the name of the device, its memory statistics, a barrier. gloo reduces by sums
alone. FlexAttention has no backward pass on a CPU: a program chooses another attention.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda *_: "cpu"  # type: ignore[attr-defined]
torch.cpu.memory_stats = lambda *_: {}  # type: ignore[attr-defined]
torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**40)  # type: ignore[attr-defined]
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
divide = FSDPModule.set_gradient_divide_factor


def divide_after_sum(module: Any, factor: float) -> None:
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    divide(module, factor)


FSDPModule.set_gradient_divide_factor = divide_after_sum  # type: ignore[method-assign]
from torchtitan.distributed import utils  # noqa: E402

utils.set_pg_timeouts = lambda **_: None
