"""Build the language model: the chunks of it that live on this rank.

Adds to Megatron's GPTModel what it lacks: rotary tables from the architecture, scaled embeddings,
scaled or capped logits, and a loss that does not see the rows by which the vocabulary was padded
for tensor parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from msllm.engine.layout import Layout
from msllm.engine.megatron import mtp
from msllm.engine.megatron.model_config import ModelConfig
from msllm.engine.megatron.modules import RotaryEmbedding
from msllm.engine.megatron.provider import block_spec


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding table: the smallest multiple of `tp` that holds the vocabulary."""
    return -(-vocab_size // tp) * tp


class LanguageModel(GPTModel):
    """A decoder-only language model, or the pipeline chunk of one."""

    def __init__(
        self,
        config: ModelConfig,
        seq_length: int,
        layers: range,
        *,
        post_process: bool,
        **kwargs: Any,
    ):
        architecture = config.architecture
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config, layers),
            vocab_size=padded_vocab_size(
                architecture.vocab_size, config.tensor_model_parallel_size
            ),
            max_sequence_length=seq_length,
            share_embeddings_and_output_weights=architecture.tie_word_embeddings,
            position_embedding_type="none",  # the rotary tables are our own
            post_process=post_process,
            mtp_block_spec=mtp.block_spec(config) if post_process else None,
            **kwargs,
        )
        self.global_layers = layers
        self.rotary = (
            RotaryEmbedding(config, architecture.max_position_embeddings or seq_length)
            if architecture.position_embedding == "rope"
            else None
        )
        if self.post_process and architecture.lm_head_bias:
            self._give_head_a_bias()
        if self.post_process and (architecture.logit_scale or architecture.logit_softcap):
            self.output_layer.register_forward_hook(_shaped_logits)

    def _give_head_a_bias(self) -> None:
        """A bias for each row of the output layer, for which Megatron's model has no switch."""
        config, rows = self.config, self.output_layer.output_size_per_partition
        data = torch.zeros(rows, dtype=config.params_dtype, device=config.torch_device)
        self.output_layer.bias = torch.nn.Parameter(data)
        set_tensor_model_parallel_attributes(
            self.output_layer.bias, is_parallel=True, dim=0, stride=1
        )

    def _preprocess(
        self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Embed tokens `[b, s]` (on the first stage) and look up the rotary tables."""
        out = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        rotary = None if self.rotary is None else self.rotary(position_ids)
        embedded, scale = out[0], self.config.architecture.embedding_scale
        if scale is not None and self.pre_process:
            # rounded to the embedding's type, as the published models were trained
            embedded = embedded * torch.tensor(scale, dtype=embedded.dtype, device=embedded.device)
        return (embedded, rotary, *out[2:])

    def _postprocess(
        self, hidden_states: Tensor, *args: Any, labels: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """Give losses `[b, s]`, logits `[b, s, v/tp]` without labels, or what the next stage gets.

        Megatron's multi-token prediction can't do without labels; logits don't need it.
        """
        if labels is None and self.mtp_process:
            tied = self.share_embeddings_and_output_weights
            weight = self.shared_embedding_or_output_weight() if tied else None
            logits: Tensor = self.output_layer(hidden_states, weight=weight)[0]
            return logits.transpose(0, 1).contiguous()
        return super()._postprocess(hidden_states, *args, labels=labels, **kwargs)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross entropy of each token: labels `[b, s]`, logits `[s, b, v/tp]` -> `[b, s]`."""
        return super().compute_language_model_loss(labels, self.without_padding(logits))

    def without_padding(self, logits: Tensor) -> Tensor:
        """Give the padding rows of this rank's part of the vocabulary no probability."""
        local = logits.size(-1)
        first = parallel_state.get_tensor_model_parallel_rank() * local
        real = max(0, min(local, self.config.architecture.vocab_size - first))
        if real == local:
            return logits
        padding = torch.arange(local, device=logits.device) >= real
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min)

    def gathered_logits(self, logits: Tensor) -> Tensor:
        """All of the vocabulary, without padding: `[b, s, v/tp]` -> `[b, s, v]`."""
        full = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        return full[..., : self.config.architecture.vocab_size]


def _shaped_logits(layer: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """The output layer's logits, scaled and capped: what the loss and all others see."""
    logits, bias = output
    architecture = layer.config.architecture
    if (scale := architecture.logit_scale) is not None:
        logits = logits * scale
    if (cap := architecture.logit_softcap) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits, bias


def build_chunks(config: ModelConfig, layout: Layout, seq_length: int) -> list[LanguageModel]:
    """Build this rank's pipeline chunks (one, or `vpp` of them), parameters not yet filled."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = layout.stages(config.num_layers)[rank]
    last = len(chunks) - 1
    models = []
    for index, layers in enumerate(chunks):
        with config.torch_device:  # Megatron makes some weights wherever torch does by default
            models.append(
                LanguageModel(
                    config,
                    seq_length,
                    layers,
                    pre_process=rank == 0 and index == 0,
                    post_process=rank == layout.pp - 1 and index == last,
                    vp_stage=index if layout.vpp > 1 else None,
                )
            )
        _mark_experts(models[-1])
    return models


def _mark_experts(chunk: LanguageModel) -> None:
    """Have the experts' gradients summed over the expert data parallel group.

    Megatron marks them so only where EP > 1; with EP 1 and TP > ETP it would sum them over too
    few ranks.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
