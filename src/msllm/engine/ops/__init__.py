"""The operators: one file each, pure-torch reference and torch_npu implementation side by side."""
