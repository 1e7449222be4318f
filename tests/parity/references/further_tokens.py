"""Models with multi-token prediction (DeepSeek-V3, GLM-4.5), which transformers does not train.

Their layers are transformers' own; how they are trained is written out from arXiv:2412.19437,
section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer

from tests.parity.references.blocks import initialize

WEIGHT = 0.1
"""Of the further losses' mean in what is trained."""
PUBLISHED = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}


class FurtherTokens(nn.Module):
    """The model, and layers that predict the token after the next and so on."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        settings = AutoConfig.for_model(**config, attn_implementation="eager")
        self.main = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).train()
        layer, norm = type(self.main.model.layers[-1]), type(self.main.model.norm)
        further = settings.get_mtp_config()
        self.further = nn.ModuleList(
            MtpLayer(further, layer, norm, k) for k in range(settings.num_nextn_predict_layers)
        )
        initialize(self.further, settings.initializer_range)
        self.layers = settings.num_hidden_layers

    def forward(self, tokens: Tensor) -> Tensor:
        self.tokens = tokens
        self.hidden = self.main.model(tokens).last_hidden_state
        return self.main.lm_head(self.hidden)

    def further_loss(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What is trained beside the loss of `forward`, and the mean that is told of it."""
        hidden, means = self.hidden, []
        trained = torch.zeros(())
        for depth, layer in enumerate(self.further, 1):
            hidden, ahead = hidden[:, :-1], self.tokens[:, depth:]
            length = ahead.size(1)
            positions = torch.arange(length)[None]
            turns = self.main.model.rotary_emb(hidden, positions)
            future = torch.full((1, 1, length, length), -torch.inf).triu(1)
            embedded = self.main.model.embed_tokens(ahead)
            hidden = layer(embedded, hidden, turns, future, positions, None)
            logits = self.main.lm_head(hidden).flatten(0, 1)
            each = nn.functional.cross_entropy(
                logits, labels[:, depth:].flatten(), reduction="none"
            )
            means.append(each.mean())
            trained = trained + WEIGHT / len(self.further) * each.sum() / labels.numel()
        return trained, torch.stack(means).mean()

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        """Weights by their published names."""
        return dict(self._published())

    def _published(self) -> Iterator[tuple[str, Tensor]]:
        main = super().state_dict()
        for name, value in main.items():
            part, rest = name.split(".", 1)
            if part == "further":
                number, rest = rest.split(".", 1)
                for ours, theirs in PUBLISHED.items():
                    rest = rest.replace(ours, theirs)
                rest = f"model.layers.{self.layers + int(number)}.{rest}"
            yield from _apart(rest, value)
        for number in range(len(self.further)):
            for copy, original in COPIES.items():
                layer = f"model.layers.{self.layers + number}."
                yield f"{layer}{copy}.weight", main[f"main.{original}.weight"]


def _apart(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Take the tensors of all experts apart."""
    prefix, _, kind = name.rpartition(".experts.")
    if not prefix:
        yield name, value
        return
    for number, matrix in enumerate(value):
        expert = f"{prefix}.experts.{number}."
        if kind == "down_proj":
            yield f"{expert}down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{expert}gate_proj.weight", gate
            yield f"{expert}up_proj.weight", up
