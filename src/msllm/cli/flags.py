"""Flags of the commands that train: one table, each flag for one setting.

A flag's help is the setting's own description, and its value goes as text to the setting's own
check, so that flags and settings can't drift apart and wrong values are shown all together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from msllm.cli.setting_names import PATHS
from msllm.cli.settings import Setting, Settings


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag for one setting.

    `many`: takes several values. `switch`: has no value, but a `--no-` form. `listed`: one value
    of items with commas between.
    """

    name: str
    path: str
    panel: str
    many: bool = False
    switch: bool = False
    listed: bool = False

    @property
    def parameter(self) -> str:
        """Its name as a Python parameter."""
        return self.name.removeprefix("--").replace("-", "_")


RUN, PARALLEL, DATA, TRAIN, SAVE = "Run", "Parallelism", "Data", "Training", "Saving and logging"

ConfigFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML file of settings", rich_help_panel=RUN),
]
"""`--config`, of the commands that have these flags."""

FLAGS = (
    Flag("--model", "model", RUN),
    Flag("--out", "out", RUN),
    Flag("--backend", "backend", RUN),
    Flag("--device", "device", RUN),
    Flag("--dtype", "dtype", RUN),
    Flag("--seed", "seed", RUN),
    Flag("--deterministic", "deterministic", RUN, switch=True),
    Flag("--data", "data.paths", DATA, many=True),
    Flag("--valid-data", "data.valid_paths", DATA, many=True),
    Flag("--valid-fraction", "data.valid_fraction", DATA),
    Flag("--tokenizer", "data.tokenizer", DATA),
    Flag("--seq-length", "data.seq_length", DATA),
    Flag("--text-key", "data.text_key", DATA),
    Flag("--steps", "train.steps", TRAIN),
    Flag("--micro-batch", "train.micro_batch", TRAIN),
    Flag("--global-batch", "train.global_batch", TRAIN),
    Flag("--optimizer", "train.optimizer", TRAIN),
    Flag("--lr", "train.lr", TRAIN),
    Flag("--min-lr", "train.min_lr", TRAIN),
    Flag("--lr-schedule", "train.lr_schedule", TRAIN),
    Flag("--warmup-steps", "train.warmup_steps", TRAIN),
    Flag("--weight-decay", "train.weight_decay", TRAIN),
    Flag("--clip-grad", "train.clip_grad", TRAIN),
    Flag("--recompute", "train.recompute", TRAIN),
    Flag("--eval-interval", "train.eval_interval", TRAIN),
    Flag("--nodes", "launch.nodes", PARALLEL),
    Flag("--npus", "launch.npus", PARALLEL),
    Flag("--tp", "layout.tp", PARALLEL),
    Flag("--pp", "layout.pp", PARALLEL),
    Flag("--vpp", "layout.vpp", PARALLEL),
    Flag("--pp-layout", "layout.pp_layout", PARALLEL, listed=True),
    Flag("--cp", "layout.cp", PARALLEL),
    Flag("--ep", "layout.ep", PARALLEL),
    Flag("--etp", "layout.etp", PARALLEL),
    Flag("--node-rank", "launch.node_rank", PARALLEL),
    Flag("--rdzv-endpoint", "launch.rdzv_endpoint", PARALLEL),
    Flag("--force", "launch.force", PARALLEL, switch=True),
    Flag("--save-interval", "checkpoint.save_interval", SAVE),
    Flag("--keep", "checkpoint.keep", SAVE),
    Flag("--init-from", "checkpoint.init_from", SAVE),
    Flag("--resume", "checkpoint.resume", SAVE),
    Flag("--export-hf", "checkpoint.export_hf", SAVE),
    Flag("--log-interval", "log.interval", SAVE),
    Flag("--tensorboard", "log.tensorboard", SAVE, switch=True),
)


def with_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of the table; it gets them as `flags`, in its keywords.

    Typer reads a function's signature, so that is where they are declared.
    """
    hints = get_type_hints(function, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    declared = [_parameter(flag) for flag in FLAGS]
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*declared, *own], return_annotation=None
    )
    function.__annotations__ = {p.name: p.annotation for p in (*declared, *own)}
    return function


def settings_of(values: dict[str, Any]) -> Settings:
    """Settings that flags gave, from the values of the parameters."""
    found: Settings = {}
    for flag in FLAGS:
        value = values.get(flag.parameter)
        if value is None or value == []:
            continue
        if flag.listed:
            value = [item.strip() for item in value.split(",")]
        found[flag.path] = Setting(value, flag.name)
    return found


def _parameter(flag: Flag) -> inspect.Parameter:
    field = PATHS[flag.path]
    help_text = field.description or ""
    default = field.get_default(call_default_factory=True)
    if default not in (None, "", False) and default != [] and not field.is_required():
        help_text += f" [default: {default}]"
    negative = f"{flag.name}/--no-{flag.name.removeprefix('--')}" if flag.switch else flag.name
    option = typer.Option(
        negative,
        help=help_text.replace("[", "\\["),
        rich_help_panel=flag.panel,
        metavar=None if flag.switch else _metavar(flag, field.annotation),
        show_default=False,
    )
    kind: Any = bool | None if flag.switch else list[str] | None if flag.many else str | None
    return inspect.Parameter(
        flag.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, option],
    )


def _metavar(flag: Flag, annotation: Any) -> str:
    """N, X, PATH, or the choices."""
    if flag.many:
        return "PATH..."
    if flag.listed:
        return "N,N,..."
    choices = _choices(annotation)
    if choices:
        return "|".join(choices)
    text = str(annotation)
    for part, word in (("int", "N"), ("float", "X"), ("Path", "DIR")):
        if part in text:
            return word
    return {"--model": "NAME_OR_DIR", "--rdzv-endpoint": "HOST:PORT"}.get(flag.name, "TEXT")


def _choices(annotation: Any) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()
