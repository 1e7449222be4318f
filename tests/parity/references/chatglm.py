"""ChatGLM 3 and GLM-4-9B under their first config: neighbours rotated in half of each head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.references.blocks import RMSNorm, angles, attend, initialize, turn_pairs

Config = dict[str, Any]


class SelfAttention(nn.Module):
    """Few key-value heads; one tensor of all queries, all keys and all values."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.size = config["kv_channels"]
        keys = config["multi_query_group_num"] * self.size
        self.rows = (heads * self.size, keys, keys)
        self.theta = 10000.0 * config["rope_ratio"]
        bias = config["add_bias_linear"]
        self.query_key_value = nn.Linear(
            hidden, sum(self.rows), bias=bias or config["add_qkv_bias"]
        )
        self.dense = nn.Linear(heads * self.size, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(x).split(self.rows, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.size)) for part in parts)
        return self.dense(attend(self._turned(q), self._turned(k), v))

    def _turned(self, x: Tensor) -> Tensor:
        half = self.size // 2
        turns = angles(x.size(1), half, self.theta)
        return torch.cat((turn_pairs(x[..., :half], turns), x[..., half:]), dim=-1)


class MLP(nn.Module):
    """SwiGLU; gate rows come before up rows."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, inner = config["hidden_size"], config["ffn_hidden_size"]
        bias = config["add_bias_linear"]
        self.dense_h_to_4h = nn.Linear(hidden, 2 * inner, bias=bias)
        self.dense_4h_to_h = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(x).chunk(2, dim=-1)
        return self.dense_4h_to_h(nn.functional.silu(gate) * up)


class Layer(nn.Module):
    """A layer with norms before its parts."""

    def __init__(self, config: Config):
        super().__init__()
        size, eps = config["hidden_size"], config["layernorm_epsilon"]
        self.self_attention, self.mlp = SelfAttention(config), MLP(config)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class ChatGLM(nn.Module):
    """The model with its output layer."""

    def __init__(self, config: Config):
        super().__init__()
        size, vocabulary = config["hidden_size"], config["padded_vocab_size"]
        self.transformer = nn.Module()
        self.transformer.embedding = nn.Module()
        self.transformer.embedding.word_embeddings = nn.Embedding(vocabulary, size)
        self.transformer.encoder = nn.Module()
        self.transformer.encoder.layers = nn.ModuleList(
            Layer(config) for _ in range(config["num_layers"])
        )
        self.transformer.encoder.final_layernorm = RMSNorm(size, config["layernorm_epsilon"])
        self.transformer.output_layer = nn.Linear(size, vocabulary, bias=False)
        initialize(self, config["initializer_range"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer.embedding.word_embeddings(tokens)
        for layer in self.transformer.encoder.layers:
            x = layer(x)
        return self.transformer.output_layer(self.transformer.encoder.final_layernorm(x))
