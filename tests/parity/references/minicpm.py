"""MiniCPM: Llama's layers with scaled embedding, residuals and logits (arXiv:2404.06395)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.parity.references.llama_shaped import Config, LlamaShaped


class MiniCPM(LlamaShaped):
    """The model; its output layer may be its embedding."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.config = config
        if config["tie_word_embeddings"]:
            del self.lm_head

    def forward(self, tokens: Tensor) -> torch.Tensor:
        config, model = self.config, self.model
        branch = config["scale_depth"] / config["num_hidden_layers"] ** 0.5
        x = config["scale_emb"] * model.embed_tokens(tokens)
        for layer in model.layers:
            x = x + branch * layer.self_attn(layer.input_layernorm(x))
            x = x + branch * layer.mlp(layer.post_attention_layernorm(x))
        width = config["hidden_size"] / config["dim_model_base"]
        tied = config["tie_word_embeddings"]
        head = model.embed_tokens.weight if tied else self.lm_head.weight
        return nn.functional.linear(model.norm(x) / width, head)
