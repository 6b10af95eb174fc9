"""This process's memory, read by address: one call reads samples of many tensors."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

LINE_BYTES = 64


class ProcessMemory:
    """Arrays over this process's memory between two addresses; owns nothing. The caller ensures that what it reads is
    mapped. ``lines`` are rows of LINE_BYTES whose addresses are ``remainder`` modulo LINE_BYTES."""

    def __init__(self, low: int, high: int, *, remainder: int = 0) -> None:
        self.low = low - (low - remainder) % LINE_BYTES
        length = -(-(high - self.low) // LINE_BYTES) * LINE_BYTES
        self.view = memoryview((ctypes.c_char * length).from_address(self.low)).cast("B")
        with torch.inference_mode(False):
            self.bytes = torch.from_numpy(np.frombuffer(self.view, dtype=np.uint8))
            self.lines = self.bytes.view(torch.int64).view(-1, LINE_BYTES // 8)
