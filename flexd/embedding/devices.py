"""Devices of tensors, and the choice between numpy and torch for work that one of them does faster."""

from __future__ import annotations

import torch


def allocated_device(device: torch.device | str) -> torch.device:
    """Return the device of a tensor that is allocated on ``device``: ``cuda`` becomes ``cuda:0`` or the current one."""
    return torch.empty(0, device=device).device


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether numpy reads the tensor without a copy; its loops over bits and masks are then the faster ones."""
    return tensor.device.type == "cpu"
