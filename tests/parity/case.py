"""Case: a tiny random model of a family, and what its reference computes with it.

The reference is transformers' class of the family, or, where there is none, a module of
`tests/parity/references` whose `state_dict` has the published names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LENGTH, VOCABULARY, SEQUENCES = 64, 131, 2
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rms_norm_eps": 3e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
"""Settings of all cases; a case's own win, and None takes one away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One tiny model.

    Attributes:
        model_type: The config's.
        config: What is special in it, beside `BASE`.
        nulls: Settings that are there and null, where that is not the config class's default.
        run: Settings of the run, by section: {"moe": {"grouped_gemm": False}}; and
            "mutation", a mistake of `tests/parity/mutations.py` to make.
        evaluated: Compare the models as evaluation runs them, without what training draws.
        reference: Makes the module from the whole config, where transformers has no class;
            called with tokens `[b, s]` it returns logits `[b, s, v]`. Its `further_loss`, if
            it has one, maps labels to what is trained beside the loss and what is told of it.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    nulls: tuple[str, ...] = ()
    run: dict[str, Any] = field(default_factory=dict)
    evaluated: bool = False
    reference: Callable[[dict[str, Any]], torch.nn.Module] | None = None

    @property
    def level(self) -> str:
        """What passing proves."""
        return "proven" if self.reference is None else "self-referenced"

    @property
    def has_experts(self) -> bool:
        """Whether expert parallelism can be tried."""
        return any("expert" in key for key in self.config)

    def write(self, folder: Path) -> None:
        """Save the model as its publisher would, its gradients alike, and what it computes."""
        torch.manual_seed(0)
        model = self._model().train(not self.evaluated)
        _spread(model)
        tokens = torch.randint(
            0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1)
        )
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        found = model(inputs)
        logits = found if isinstance(found, torch.Tensor) else found.logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self._save(model, folder)
        truth = {"tokens": inputs, "labels": labels, "logits": logits.detach()}
        trained = loss
        if hasattr(model, "further_loss"):
            further, mean = model.further_loss(labels)
            trained, truth["mtp"] = loss + further, mean.detach()
        trained.backward()
        torch.save({**truth, "loss": loss.detach()}, folder / "truth.pt")
        (folder / "run.json").write_text(json.dumps(self.run | {"evaluated": self.evaluated}))
        with torch.no_grad():
            for parameter in model.parameters():
                gradient = parameter.grad
                parameter.copy_(torch.zeros(()) if gradient is None else gradient)
        self._save(model, folder / "gradients")

    def _settings(self) -> dict[str, Any]:
        given = {k: v for k, v in (BASE | self.config).items() if v is not None}
        return given | dict.fromkeys(self.nulls)

    def _model(self) -> torch.nn.Module:
        if self.reference is not None:
            return self.reference({"model_type": self.model_type, **self._settings()})
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            self.model_type, **self._settings(), attn_implementation="eager"
        )
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def _save(self, model: torch.nn.Module, folder: Path) -> None:
        if self.reference is None:
            model.save_pretrained(folder, max_shard_size="60KB")
            return
        folder.mkdir(parents=True)
        config = {"model_type": self.model_type, **self._settings()}
        (folder / "config.json").write_text(json.dumps(config))
        weights = {n: w.detach().clone() for n, w in model.state_dict().items()}
        save_file(weights, folder / "model.safetensors")


def _spread(model: torch.nn.Module) -> None:
    """Move norms from one, and biases and sinks from zero: they would hide a mix-up."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            assert parameter.isfinite().all(), name
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
