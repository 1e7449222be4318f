"""One rank of a Muon test job: trains, and reports curves and how each parameter moved.

Usage: muon_cases.py CASES.json OUT.json, with torchrun's variables and the stand-in for
`emerging_optimizers` on PYTHONPATH. A case with `save` writes a checkpoint after its second step;
one with `load` goes on from there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoint_cases import save
from groups import leave
from megatron_case import build, data

SAVED_AT = 2
BETA, DECAY, LR = 0.9, 0.1, 3e-3


def run(case: dict[str, Any]) -> dict[str, Any]:
    train = {"optimizer": "muon", "muon_momentum": BETA, "weight_decay": DECAY, "lr": LR}
    train |= {"lr_schedule": "constant"}
    backend = build(case | {"train": train})
    start = 0
    if "load" in case:
        start = SAVED_AT
        backend.load(Path(case["load"]), start)
    losses, norms = [], []
    moves = Moves(backend) if case.get("moves") else None
    for step in range(start + 1, start + case["steps"] + 1):
        result = backend.train_step(data(backend, step, False), step)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if moves and step <= Moves.STEPS:
            moves.note()
        if step == SAVED_AT and "save" in case:
            save(backend, Path(case["save"]), background=False)

    report = {"losses": losses, "norms": norms, "kinds": kinds(backend)}
    if moves:
        report["moves"] = moves.report()
    leave()
    return report


def kinds(backend: Any) -> dict[str, list[str]]:
    """Class of the inner optimizer -> names of the parameters that it updates."""
    from msllm.engine.megatron.optimizer import inner_optimizers

    names = {
        id(parameter): name
        for chunk in backend.chunks
        for name, parameter in chunk.module.named_parameters()
    }
    found: dict[str, list[str]] = {}
    for inner in inner_optimizers(backend.optimizer):
        for group in inner.param_groups:
            held = found.setdefault(type(inner).__name__, [])
            # bf16's are master weights: others than the model's
            held += [names.get(id(parameter), "master") for parameter in group["params"]]
    return found


class Moves:
    """Repeats the first steps of some matrices with torch's own Muon and AdamW."""

    STEPS = 2
    MATRICES = (
        "decoder.layers.1.self_attention.linear_proj.weight",
        "decoder.layers.2.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
    )
    OTHERS = (
        "embedding.word_embeddings.weight", "output_layer.weight",
        "decoder.layers.1.self_attention.q_layernorm.weight",
    )  # fmt: skip

    def __init__(self, backend: Any):
        module = backend.chunks[0].module
        self.real = dict(module.named_parameters())
        self.start = {name: p.detach().clone() for name, p in self.real.items()}
        self.twins = {
            name: torch.nn.Parameter(self.start[name].clone())
            for name in (*self.MATRICES, *self.OTHERS)
        }
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        for name in self.MATRICES:
            # Its scale is 0.2 sqrt(max(rows, columns)), Megatron's without the 0.2; and its
            # decay is lr * weight_decay, so both are brought to Megatron's.
            self.optimizers[name] = torch.optim.Muon(
                [self.twins[name]],
                lr=5 * LR,
                weight_decay=DECAY / 5,
                momentum=BETA,
                nesterov=False,
                adjust_lr_fn="match_rms_adamw",
            )
        for name in self.OTHERS:
            decay = DECAY if self.start[name].dim() > 1 else 0.0
            self.optimizers[name] = torch.optim.AdamW(
                [self.twins[name]], lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay
            )

    def note(self) -> None:
        """After a step: the gradients that it used are still there."""
        for name, twin in self.twins.items():
            twin.grad = self.real[name].main_grad.clone()
            self.optimizers[name].step()

    def report(self) -> dict[str, float]:
        """How far the real parameter's way is from its twin's, relative to the way's length."""
        return {
            name: float((self.real[name] - twin).norm() / (twin - self.start[name]).norm())
            for name, twin in self.twins.items()
        }


def main() -> None:
    cases, out = (Path(argument) for argument in sys.argv[1:])
    reports = {case["name"]: run(case) for case in json.loads(cases.read_text())}
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(reports))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
