"""Plain PyTorch models of families that transformers has no class for.

Written from the published descriptions and sharing nothing with msllm; their `state_dict` has the
published names. Each is made from a whole config and maps tokens `[b, s]` to logits `[b, s, v]`.
"""
