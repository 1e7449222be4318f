"""The operators: one file each, pure-torch reference and torch_npu implementation side by side."""

from msllm.engine.ops.operators import REFERENCE, Operators, operators_for

__all__ = ["REFERENCE", "Operators", "operators_for"]
