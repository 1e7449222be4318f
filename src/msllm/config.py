"""RunConfig: the whole of one run, as data.

Every setting of a run is a field here, with its meaning as the field's description; unknown keys
are refused. Where values come from (flags, files, the catalog) is `msllm.cli.settings`' business,
and what they do is the engine's. Values are checked one by one here; whether they fit together is
checked by `msllm.engine.preflight`, which knows the model and the machine.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

LARGEST = 10**12
"""Of whole numbers; larger ones are slips of the finger, and overflow somewhere below."""
Positive = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


def _number(value: Any) -> Any:
    """Take `2e-5` for a number: YAML 1.1 reads a float without a dot as text."""
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value.strip()) else value


Real = Annotated[float, BeforeValidator(_number)]
PositiveReal = Annotated[float, BeforeValidator(_number), Field(gt=0.0)]
NonNegativeReal = Annotated[float, BeforeValidator(_number), Field(ge=0.0)]


RecomputeModule = Literal["core_attn", "mlp", "moe", "moe_act", "layernorm"]


class Section(BaseModel):
    """Base of the config's parts: immutable, unknown keys and infinite numbers refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where pydantic would take them for 1 and 0."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and "bool" not in str(field.annotation):
            raise ValueError("must be a number or text, not true or false")
        return value

    @field_validator("*")
    @classmethod
    def _no_nul(cls, value: Any) -> Any:
        """Refuse a byte that no path can hold; YAML can write it."""
        if any("\0" in str(item) for item in (value if isinstance(value, list) else [value])):
            raise ValueError("must have no NUL byte")
        return value


class LayoutConfig(Section):
    """How the model and the batch are spread over the devices."""

    tp: Positive = Field(1, description="tensor parallel size")
    pp: Positive = Field(1, description="pipeline parallel size")
    vpp: Positive = Field(1, description="virtual pipeline chunks a stage (1: not interleaved)")
    cp: Positive = Field(1, description="context parallel size")
    ep: Positive = Field(1, description="expert parallel size")
    etp: Positive = Field(1, description="tensor parallel size inside an expert")
    pp_layout: list[NonNegative] | None = Field(
        None,
        description="transformer layers of each pipeline chunk, first to last (pp x vpp numbers); "
        "balanced when not given",
    )
    sequence_parallel: bool | None = Field(
        None, description="shard activations of norms along the sequence; on when tp > 1"
    )
    distributed_optimizer: bool = Field(
        True, description="shard optimizer state over the data parallel ranks"
    )


class LaunchConfig(Section):
    """How many processes run and how they find each other."""

    nodes: Positive = Field(1, description="number of machines")
    npus: Positive = Field(1, description="devices (processes) on each machine")
    node_rank: NonNegative | None = Field(
        None, description="this machine's number; read from the scheduler when not given"
    )
    rdzv_endpoint: str | None = Field(
        None, description="HOST:PORT of the first machine; read from the scheduler when not given"
    )
    rdzv_timeout: Positive = Field(900, description="seconds to wait for the other machines")
    stop_timeout: Positive = Field(
        600, description="seconds workers get to save after a stop signal"
    )
    force: bool = Field(False, description="start even if the memory estimate says it won't fit")

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.nodes * self.npus


class DataConfig(Section):
    """What the model is trained on and how it is cut into samples."""

    paths: list[str] = Field(
        default_factory=list,
        description="`mock`, indexed prefixes or raw files and folders, each with an optional "
        "weight: 0.7:code",
    )
    tokenizer: Path | None = Field(
        None, description="tokenizer folder; needed for raw data, saved with the weights"
    )
    seq_length: Positive = Field(4096, description="tokens a sample")
    valid_fraction: Fraction = Field(0.0, description="share of the documents kept for validation")
    valid_paths: list[str] = Field(
        default_factory=list, description="separate validation data, written like paths"
    )
    text_key: str = Field("text", description="field or column of raw records that holds the text")
    cache_dir: Path | None = Field(
        None, description="where tokenized raw data is kept (default: ~/.cache/msllm/data)"
    )
    workers: Positive = Field(1, le=256, description="processes that tokenize raw data")
    shuffle: bool = Field(True, description="shuffle documents and samples, anew each epoch")
    loader_workers: NonNegative = Field(0, description="background threads that prepare batches")
    eod_mask_loss: bool = Field(False, description="do not train on the end-of-document token")


class TrainConfig(Section):
    """Steps, batches, the optimizer and its schedule."""

    steps: Positive = Field(1000, description="optimizer steps")
    micro_batch: Positive = Field(1, description="samples a forward pass")
    global_batch: Positive | None = Field(
        None, description="samples a step over all ranks; micro_batch x dp when not given"
    )
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="update rule of matrices")
    lr: PositiveReal = Field(3e-4, description="peak learning rate")
    min_lr: NonNegativeReal = Field(0.0, description="learning rate at the end of the schedule")
    lr_schedule: Literal["cosine", "linear", "constant", "wsd", "inverse-square-root"] = Field(
        "cosine", description="shape of the decay after warm-up"
    )
    warmup_steps: NonNegative = Field(0, description="steps of linear warm-up")
    decay_steps: Positive | None = Field(
        None, description="step at which the schedule ends; steps when not given"
    )
    wsd_decay_steps: Positive | None = Field(
        None, description="last steps in which wsd decays; a tenth of the schedule when not given"
    )
    weight_decay: NonNegativeReal = Field(0.1, description="decoupled weight decay")
    beta1: Annotated[Real, Field(ge=0.0, lt=1.0)] = Field(0.9, description="Adam's beta1")
    beta2: Annotated[Real, Field(ge=0.0, lt=1.0)] = Field(0.95, description="Adam's beta2")
    eps: PositiveReal = Field(1e-8, description="Adam's epsilon")
    muon_momentum: Annotated[Real, Field(ge=0.0, lt=1.0)] = Field(
        0.95, description="Muon's momentum"
    )
    clip_grad: NonNegativeReal = Field(1.0, description="largest gradient norm, 0 for no clipping")
    init_std: PositiveReal | None = Field(
        None, description="deviation of initial weights; the model's initializer_range otherwise"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations recomputed in backward instead of kept"
    )
    recompute_modules: list[RecomputeModule] = Field(
        default=["core_attn"], description="what selective recompute recomputes"
    )
    recompute_layers: Positive = Field(
        1, description="layers in one recomputed block (full recompute)"
    )
    overlap_grad_reduce: bool = Field(
        False, description="reduce gradients while backward still runs"
    )
    overlap_param_gather: bool = Field(
        False, description="gather updated parameters while forward already runs"
    )
    eval_interval: NonNegative = Field(0, description="steps between validations, 0 for none")
    eval_batches: Positive = Field(10, description="global batches a validation")


class MoeConfig(Section):
    """Mixture of experts; without effect on dense models."""

    aux_loss_coeff: NonNegativeReal | None = Field(
        None, description="weight of the load-balancing loss; the model's own otherwise"
    )
    z_loss_coeff: NonNegativeReal = Field(0.0, description="weight of the router's z loss")
    dispatcher: Literal["allgather", "alltoall"] = Field(
        "alltoall", description="how tokens travel to their experts"
    )
    grouped_gemm: bool = Field(
        True, description="one grouped matmul for all experts of a rank, not one matmul each"
    )


class CheckpointConfig(Section):
    """What is saved, when, and what a run starts from."""

    save_interval: NonNegative = Field(
        0, description="steps between checkpoints, 0 for only the last"
    )
    keep: NonNegative = Field(0, description="newest checkpoints kept, 0 for all")
    async_save: bool = Field(False, description="write checkpoints while training goes on")
    init_from: Path | None = Field(
        None, description="Hugging Face weights, a checkpoint or a run that a new run starts from"
    )
    export_hf: Literal["never", "last", "every"] = Field(
        "never", description="which saves are written as Hugging Face weights too, to out/hf/step-N"
    )
    resume: str = Field(
        "auto", description="auto: newest complete checkpoint in out; never; or a checkpoint folder"
    )


class LogConfig(Section):
    """Where figures go beside metrics.jsonl."""

    interval: Positive = Field(1, description="steps between lines")
    tensorboard: bool = Field(False, description="write TensorBoard events to out/tensorboard")
    wandb_project: str | None = Field(None, description="send figures to this wandb project")
    swanlab_project: str | None = Field(None, description="send figures to this swanlab project")
    peak_tflops: PositiveReal | None = Field(
        None, description="the device's peak for MFU; from the device table, or measured, otherwise"
    )


class RunConfig(Section):
    """One run, whole: enough to repeat it."""

    model: str = Field(description="catalog name, or a folder with a config.json")
    backend: Literal["mcore", "fsdp2"] = Field("mcore", description="what trains the model")
    device: Literal["auto", "npu", "cuda", "cpu"] = Field("auto", description="kind of device")
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="precision of parameters and maths")
    seed: NonNegative = Field(1234, description="seed of initialization and data order")
    deterministic: bool = Field(False, description="only deterministic kernels")
    out: Path | None = Field(None, description="the run's folder (default: runs/MODEL-N)")
    layout: LayoutConfig = LayoutConfig()
    launch: LaunchConfig = LaunchConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    moe: MoeConfig = MoeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


def write_run(config: RunConfig, path: Path) -> None:
    """Write a run's settings as YAML; the file appears whole or not at all."""
    import os

    import yaml

    text = yaml.safe_dump(
        config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100
    )
    new = path.with_name(f".{path.name}.tmp")
    with new.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(new, path)


def read_run(path: Path) -> RunConfig:
    """Read what `write_run` wrote."""
    import yaml

    return RunConfig.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
