"""msllm: train large language models on Huawei Ascend NPUs from one command line."""

__version__ = "0.1.0"
