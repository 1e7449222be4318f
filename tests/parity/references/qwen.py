"""The first Qwen: one tensor of q, k and v with a bias; the MLP's gate is `w2`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.parity.references.blocks import RMSNorm, angles, attend, initialize, turn_halves

Config = dict[str, Any]


class Attention(nn.Module):
    """A key and a value for each head."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, self.size = config["hidden_size"], config["kv_channels"]
        self.theta = config["rotary_emb_base"]
        rows = config["num_attention_heads"] * self.size
        self.c_attn = nn.Linear(hidden, 3 * rows)
        self.c_proj = nn.Linear(rows, hidden, bias=not config["no_bias"])

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.size)) for part in parts)
        turns = angles(x.size(1), self.size, self.theta)
        return self.c_proj(attend(turn_halves(q, turns), turn_halves(k, turns), v))


class MLP(nn.Module):
    """SwiGLU; the published width counts gate and up together."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"] // 2
        bias = not config["no_bias"]
        self.w1 = nn.Linear(hidden, inner, bias=bias)
        self.w2 = nn.Linear(hidden, inner, bias=bias)
        self.c_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.w1(x) * nn.functional.silu(self.w2(x)))


class Block(nn.Module):
    """A layer with norms before its parts."""

    def __init__(self, config: Config):
        super().__init__()
        size, eps = config["hidden_size"], config["layer_norm_epsilon"]
        self.ln_1, self.attn = RMSNorm(size, eps), Attention(config)
        self.ln_2, self.mlp = RMSNorm(size, eps), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Qwen(nn.Module):
    """The model with its output layer."""

    def __init__(self, config: Config):
        super().__init__()
        size, vocabulary = config["hidden_size"], config["vocab_size"]
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(vocabulary, size)
        self.transformer.h = nn.ModuleList(
            Block(config) for _ in range(config["num_hidden_layers"])
        )
        self.transformer.ln_f = RMSNorm(size, config["layer_norm_epsilon"])
        self.lm_head = nn.Linear(size, vocabulary, bias=False)
        initialize(self, config["initializer_range"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer.wte(tokens)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))
