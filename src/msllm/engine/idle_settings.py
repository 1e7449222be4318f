"""Settings that somebody gave and that will do nothing in this run, or not what they expect.

They are worth a warning, not a refusal: `preflight` refuses what can't work.
"""

from __future__ import annotations

from collections.abc import Iterator

from msllm.config import RunConfig, TrainConfig
from msllm.models.architecture import Architecture


def idle_settings(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    """Say of each such setting why it will do nothing."""
    yield from _recompute(config.train, architecture)
    yield from _schedule(config.train)
    yield from _validation(config)
    yield from _experts(config, architecture)
    yield from _muon(config, architecture)


def _recompute(train: TrainConfig, architecture: Architecture) -> Iterator[str]:
    modules = set(train.recompute_modules)
    default = set(TrainConfig().recompute_modules)
    if train.recompute != "selective":
        if modules != default:
            yield "train.recompute_modules does nothing without --recompute selective"
    else:
        layers = range(architecture.num_layers)
        if "moe" in modules and not architecture.is_moe:
            yield "train.recompute_modules: the model has no experts, moe recomputes nothing"
        if "mlp" in modules and all(architecture.has_experts(layer) for layer in layers):
            yield "train.recompute_modules: all layers have experts, mlp recomputes nothing"
    if train.recompute != "full" and train.recompute_layers > 1:
        yield "train.recompute_layers does nothing without --recompute full"


def _schedule(train: TrainConfig) -> Iterator[str]:
    if train.wsd_decay_steps is not None and train.lr_schedule != "wsd":
        yield f"train.wsd_decay_steps does nothing with the {train.lr_schedule} schedule"
    if train.steps <= train.warmup_steps:
        yield (
            f"the run's {train.steps} steps end within the {train.warmup_steps} of warm-up: the "
            "learning rate never reaches its peak"
        )


def _validation(config: RunConfig) -> Iterator[str]:
    held_out = bool(config.data.valid_paths or config.data.valid_fraction)
    if config.train.eval_interval and not held_out:
        yield "train.eval_interval does nothing: there is no validation data (--valid-data)"
    if held_out and not config.train.eval_interval:
        yield "validation data does nothing unless train.eval_interval is set"


def _experts(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    given = [f"moe.{name}" for name in sorted(config.moe.model_fields_set)]
    changed = [n for n in given if getattr(config.moe, n[4:]) != _default(config, n[4:])]
    if changed and not architecture.is_moe:
        verb = "do" if len(changed) > 1 else "does"
        yield f"{', '.join(changed)} {verb} nothing: the model has no experts"


def _default(config: RunConfig, name: str) -> object:
    return type(config.moe).model_fields[name].get_default()


def _muon(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    if config.train.optimizer != "muon":
        return
    layout, world = config.layout, config.launch.world_size
    if layout.distributed_optimizer and world > layout.tp * layout.pp * layout.cp:
        yield (
            "layout.distributed_optimizer does nothing with Muon, which needs whole matrices: "
            "every data parallel rank holds all of the optimizer's state"
        )
    if config.moe.grouped_gemm and architecture.is_moe:
        yield "moe.grouped_gemm does nothing with Muon: it updates each expert's matrix by itself"
