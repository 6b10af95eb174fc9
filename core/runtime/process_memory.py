"""This process's own memory, read by address: many tensors by one call."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

LINE_BYTES = 64


class ProcessMemory:
    """This process's memory between two addresses, as arrays. The caller must know that what it reads is mapped. It
    owns nothing. ``lines`` begin where an address has this ``remainder`` by their length."""

    def __init__(self, low: int, high: int, *, remainder: int = 0) -> None:
        self.low = low - (low - remainder) % LINE_BYTES
        length = -(-(high - self.low) // LINE_BYTES) * LINE_BYTES
        self.view = memoryview((ctypes.c_char * length).from_address(self.low)).cast("B")
        with torch.inference_mode(False):
            self.bytes = torch.from_numpy(np.frombuffer(self.view, dtype=np.uint8))
            self.lines = self.bytes.view(torch.int64).view(-1, LINE_BYTES // 8)
