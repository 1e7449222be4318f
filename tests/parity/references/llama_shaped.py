"""InternLM 1 (biases in attention), Baichuan 7B (one tensor of q, k and v) and Aquila."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.references.blocks import (
    RMSNorm,
    angles,
    attend,
    initialize,
    stretched,
    turn_halves,
)

Config = dict[str, Any]


class Attention(nn.Module):
    """Attention with separate projections, or `W_pack` of all three."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.groups = config.get("num_key_value_heads", self.heads)
        self.size = hidden // self.heads
        self.config, bias = config, config.get("bias", False)
        keys = self.groups * self.size
        self.packed = config["model_type"] == "baichuan"
        if self.packed:
            self.W_pack = nn.Linear(hidden, 3 * hidden, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, hidden, bias=bias)
            self.k_proj = nn.Linear(hidden, keys, bias=bias)
            self.v_proj = nn.Linear(hidden, keys, bias=bias)
        self.o_proj = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            q, k, v = self.W_pack(x).chunk(3, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (-1, self.size)) for t in (q, k, v))
        turns = angles(x.size(1), self.size, self._theta(x.size(1)))
        return self.o_proj(attend(turn_halves(q, turns), turn_halves(k, turns), v))

    def _theta(self, length: int) -> float:
        rotary = self.config.get("rotary", {})
        theta = rotary.get("base", self.config.get("rope_theta", 10000.0))
        if rotary.get("type") != "dynamic":
            return theta
        trained = self.config["max_position_embeddings"]
        return stretched(theta, rotary.get("scaling_factor", 1.0), length, trained, self.size)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A layer with norms before its parts."""

    def __init__(self, config: Config):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaShaped(nn.Module):
    """The model with its output layer."""

    def __init__(self, config: Config):
        super().__init__()
        size, vocabulary = config["hidden_size"], config["vocab_size"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocabulary, size)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = RMSNorm(size, config["rms_norm_eps"])
        self.lm_head = nn.Linear(size, vocabulary, bias=False)
        initialize(self, config["initializer_range"])

    def forward(self, tokens: Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))
