"""WORK on models: devices, layouts, operators, data, training. Everything here may import torch."""
