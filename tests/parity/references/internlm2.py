"""InternLM 2 and 2.5: one tensor has each group's queries, key and value together."""

from __future__ import annotations

from typing import Any

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
    """Grouped attention."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.groups, self.size = config["num_key_value_heads"], hidden // heads
        self.config = config
        rows = (heads + 2 * self.groups) * self.size
        self.wqkv = nn.Linear(hidden, rows, bias=config["bias"])
        self.wo = nn.Linear(hidden, hidden, bias=config["bias"])

    def forward(self, x: Tensor) -> Tensor:
        groups = self.wqkv(x).unflatten(-1, (self.groups, -1, self.size))  # [b, s, g, q k v, d]
        q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        turns = angles(x.size(1), self.size, self._theta(x.size(1)))
        return self.wo(attend(turn_halves(q, turns), turn_halves(k, turns), v))

    def _theta(self, length: int) -> float:
        theta, scaling = self.config["rope_theta"], self.config.get("rope_scaling")
        if scaling is None:
            return theta
        assert scaling["type"] == "dynamic"
        trained = self.config["max_position_embeddings"]
        return stretched(theta, scaling["factor"], length, trained, self.size)


class FeedForward(nn.Module):
    """SwiGLU: w1 is the gate, w3 goes up, w2 down."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """A layer with norms before its parts."""

    def __init__(self, config: Config):
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.attention_norm, self.ffn_norm = RMSNorm(size, eps), RMSNorm(size, eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class InternLM2(nn.Module):
    """The model with its output layer."""

    def __init__(self, config: Config):
        super().__init__()
        size, vocabulary = config["hidden_size"], config["vocab_size"]
        self.model = nn.Module()
        self.model.tok_embeddings = nn.Embedding(vocabulary, size)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = RMSNorm(size, config["rms_norm_eps"])
        self.output = nn.Linear(size, vocabulary, bias=False)
        initialize(self, config["initializer_range"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.tok_embeddings(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.output(self.model.norm(x))
