"""The names of all settings, and what to suggest for a name that is none.

Names that other training software uses for the same thing are known, so that a file brought along
from there gets a useful answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from msllm.config import RunConfig, Section
from msllm.errors import closest


def _section(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    for name, field in RunConfig.model_fields.items():
        section = _section(field)
        if section is None:
            yield name, field
        else:
            for inner, inner_field in section.model_fields.items():
                yield f"{name}.{inner}", inner_field


SECTIONS = tuple(name for name, field in RunConfig.model_fields.items() if _section(field))
"""Groups of settings: `layout`, `train` and so on."""

PATHS: dict[str, FieldInfo] = dict(_fields())
"""Every setting by its dotted path, in the order of RunConfig."""

ELSEWHERE = {
    "learning_rate": "train.lr", "max_lr": "train.lr", "min_learning_rate": "train.min_lr",
    "num_steps": "train.steps", "max_steps": "train.steps", "train_iters": "train.steps",
    "num_train_steps": "train.steps", "iterations": "train.steps",
    "batch_size": "train.global_batch", "global_batch_size": "train.global_batch",
    "micro_batch_size": "train.micro_batch", "per_device_train_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.global_batch",
    "max_seq_length": "data.seq_length", "seq_len": "data.seq_length",
    "sequence_length": "data.seq_length", "max_length": "data.seq_length",
    "cutoff_len": "data.seq_length", "data_path": "data.paths", "dataset": "data.paths",
    "data": "data.paths", "tokenizer_path": "data.tokenizer",
    "tokenizer_name_or_path": "data.tokenizer", "valid_data": "data.valid_paths",
    "tensor_model_parallel_size": "layout.tp", "tensor_parallel_size": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp", "pipeline_parallel_size": "layout.pp",
    "context_parallel_size": "layout.cp", "expert_model_parallel_size": "layout.ep",
    "expert_parallel_size": "layout.ep", "expert_tensor_parallel_size": "layout.etp",
    "virtual_pipeline_model_parallel_size": "layout.vpp",
    "use_distributed_optimizer": "layout.distributed_optimizer",
    "num_nodes": "launch.nodes", "nnodes": "launch.nodes", "nproc_per_node": "launch.npus",
    "npus_per_node": "launch.npus", "gpus_per_node": "launch.npus",
    "lr_decay_style": "train.lr_schedule", "lr_scheduler_type": "train.lr_schedule",
    "lr_scheduler": "train.lr_schedule", "lr_warmup_iters": "train.warmup_steps",
    "num_warmup_steps": "train.warmup_steps", "warmup": "train.warmup_steps",
    "lr_decay_iters": "train.decay_steps", "wd": "train.weight_decay",
    "adam_beta1": "train.beta1", "adam_beta2": "train.beta2", "adam_eps": "train.eps",
    "max_grad_norm": "train.clip_grad", "gradient_clipping": "train.clip_grad",
    "recompute_granularity": "train.recompute", "gradient_checkpointing": "train.recompute",
    "save_steps": "checkpoint.save_interval", "save_interval": "checkpoint.save_interval",
    "save_total_limit": "checkpoint.keep", "output_dir": "out", "save": "out",
    "model_name_or_path": "model", "model_name": "model", "precision": "dtype",
    "logging_steps": "log.interval", "log_interval": "log.interval",
    "moe_aux_loss_coeff": "moe.aux_loss_coeff", "eval_steps": "train.eval_interval",
}  # fmt: skip


def suggestion(path: str) -> str:
    """Say which setting was probably meant, and so where it belongs."""
    spelled = path.replace("-", "_")
    if spelled in PATHS:
        return f"write {spelled}"
    leaf = spelled.rpartition(".")[2]
    known = ELSEWHERE.get(leaf) or next((p for p in PATHS if p.rpartition(".")[2] == leaf), None)
    if known:
        return (
            f"it is called {known} here" if known.rpartition(".")[2] != leaf else f"write {known}"
        )
    return f"did you mean {closest(spelled, _near(spelled), 1)[0]}?"


def _near(path: str) -> list[str]:
    """List the settings to compare with: those of the same section, if it is one."""
    section = path.partition(".")[0]
    return [p for p in PATHS if p.startswith(f"{section}.")] or list(PATHS)
