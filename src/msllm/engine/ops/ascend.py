"""What the torch_npu implementations share: the lazy import, and the checks no kernel makes.

torch_npu's host code lets a good deal pass that its kernels then read as something else: operands
of different dtypes, float masks, lengths that are not cumulative. The implementations refuse those
themselves, before torch_npu is so much as imported, so that the refusals are tested on any machine.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
from torch import Tensor

_logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels compute in."""


def torch_npu() -> Any:
    """Give torch_npu, imported at the first call: this package must load where it is missing."""
    return importlib.import_module("torch_npu")


def require_one_dtype(operator: str, **tensors: Tensor) -> None:
    """Refuse operands of different dtypes, or of one that the kernels lack.

    Raises:
        TypeError: With the dtype of each operand.
    """
    found = {tensor.dtype for tensor in tensors.values()}
    if len(found) > 1 or not found <= set(DTYPES):
        given = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise TypeError(f"{operator} needs fp32, bf16 or fp16, the same for all: {given}")


def require_dtype(operator: str, name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Refuse an operand that is of none of the dtypes that the kernel reads it as.

    Raises:
        TypeError: With what it is and what is allowed.
    """
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{operator} needs {wanted} {name}, not {tensor.dtype}")


@functools.cache
def left_to_reference(operator: str, why: str) -> None:
    """Log, once a process and reason, that a call goes to the pure-torch implementation."""
    _logger.info("%s: %s has no fused kernel here, plain torch computes it", operator, why)
