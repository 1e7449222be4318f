"""WORK on models: devices, layouts, operators, data, training. Everything here may import torch."""

import os

# torch imports an installed torch_npu by itself, and where CANN is missing even `import torch`
# fails then. `msllm.engine.device` imports it when an NPU is asked for, and can say what is wrong.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
