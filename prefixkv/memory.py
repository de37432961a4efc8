"""How much memory a device has, and how much of it no process holds."""

from typing import NamedTuple

import psutil
import torch


class Memory(NamedTuple):
    """Of one device, in bytes."""

    total: int
    free: int


def memory_of(device: torch.device) -> Memory:
    """Ask the driver of a GPU, or the operating system.

    What torch keeps in reserve on a GPU counts as held.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free)
    host = psutil.virtual_memory()
    return Memory(host.total, host.available)
