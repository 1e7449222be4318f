"""Where each field of RunConfig shows up in the engine: a table, and the functions that look.

What is looked at is what the engine built or did, never the settings themselves.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from msllm.config import RunConfig

END = 2
"""Token that ends each document."""


class Changed:
    """Equal to anything: an arrival that only has to differ from that of the default."""

    def __eq__(self, other: object) -> bool:
        return True


class Mentions:
    """Equal to what contains it."""

    def __init__(self, text: str):
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str | list) and self.text in other


CHANGED: Any = Changed()


@dataclass(frozen=True)
class Arrival:
    """Where a field shows up.

    Attributes:
        field: Its dotted name.
        value: A value that is not the default.
        look: Path into the report of `case`, or a function of the whole RunConfig.
        expected: What is found there; with the default, something else is.
        case: Which of CASES is built with all of its arrivals' values set.
        given: Settings beside it that both looks of a function get.
    """

    field: str
    value: Any
    look: str | Callable[[RunConfig], Any]
    expected: Any
    case: str = ""
    given: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    # name: (ranks of the pretended world, or 0 for a run; settings of the case)
    "dense": (2, {"model": "dense", "train.steps": 12}),
    "linear": (1, {"model": "dense", "train.steps": 12}),
    "full": (1, {"model": "dense"}),
    "selective": (1, {"model": "dense", "train.recompute": "selective"}),
    "gather": (2, {"model": "dense", "train.overlap_grad_reduce": True}),
    "layout": (48, {"model": "experts"}),
    "sequence": (2, {"model": "dense", "layout.tp": 2}),
    "experts": (1, {"model": "experts"}),
    "muon": (1, {"model": "dense"}),
    "momentum": (1, {"model": "dense", "train.optimizer": "muon"}),
    "run": (0, {"train.steps": 4, "dtype": "fp32", "data.valid_fraction": 0.2}),
    "resume": (0, {"train.steps": 4, "dtype": "fp32", "checkpoint.save_interval": 2}),
    "narrow": (0, {"train.steps": 1, "dtype": "fp32"}),
    "device": (0, {"train.steps": 1, "dtype": "fp32"}),
}


def engine(case: str) -> Callable[..., Arrival]:
    def arrival(field: str, value: Any, look: str, expected: Any = None) -> Arrival:
        return Arrival(field, value, look, value if expected is None else expected, case)

    return arrival


dense, layout, experts, run = engine("dense"), engine("layout"), engine("experts"), engine("run")

BUILT = [
    dense("dtype", "fp32", "embedding.dtype", "torch.float32"),
    dense("seed", 99, "embedding.digest", CHANGED),
    dense("data.seq_length", 48, "sequence"),
    dense("layout.distributed_optimizer", False, "ddp.use_distributed_optimizer"),
    dense("layout.distributed_optimizer", False, "optimizer.use_distributed_optimizer"),
    dense("train.lr", 7e-4, "schedule.peak"),
    dense("train.lr", 7e-4, "optimizer.lr"),
    dense("train.min_lr", 1e-5, "schedule.last"),
    dense("train.min_lr", 1e-5, "optimizer.min_lr"),
    dense("train.lr_schedule", "wsd", "schedule.last_at_peak", 6),
    dense("train.warmup_steps", 3, "schedule.first_at_peak"),
    dense("train.decay_steps", 10, "schedule.ends"),
    dense("train.wsd_decay_steps", 4, "schedule.last_at_peak", 10 - 4),
    dense("train.weight_decay", 0.03, "optimizer.decay"),
    dense("train.beta1", 0.8, "optimizer.betas.0"),
    dense("train.beta2", 0.97, "optimizer.betas.1"),
    dense("train.eps", 1e-7, "optimizer.eps"),
    dense("train.clip_grad", 0.5, "optimizer.clip_grad"),
    dense("train.init_std", 0.5, "embedding.std", pytest.approx(0.5, rel=0.02)),
    dense("train.overlap_grad_reduce", True, "ddp.overlap_grad_reduce"),
    dense("train.overlap_grad_reduce", True, "lazy.0"),
    engine("gather")("train.overlap_param_gather", True, "ddp.overlap_param_gather"),
    engine("linear")(
        "train.lr_schedule",
        "linear",
        "schedule.rates",
        [pytest.approx(3e-4 * (12 - step) / 12, abs=1e-12) for step in range(1, 13)],
    ),
    engine("full")("train.recompute", "full", "config.recompute_granularity"),
    engine("full")("train.recompute_layers", 3, "config.recompute_num_layers"),
    engine("selective")("train.recompute_modules", ["mlp"], "config.recompute_modules"),
    layout("layout.tp", 4, "groups.tp"),
    layout("layout.tp", 4, "config.tensor_model_parallel_size"),
    layout("layout.pp", 2, "groups.pp"),
    layout("layout.vpp", 2, "groups.vpp"),
    layout("layout.cp", 2, "groups.cp"),
    layout("layout.ep", 3, "groups.ep"),
    layout("layout.etp", 2, "groups.etp"),
    layout("layout.pp_layout", [2, 1, 1, 1], "layers", [[0, 1], [3]]),
    engine("sequence")("layout.sequence_parallel", False, "config.sequence_parallel"),
    experts("moe.aux_loss_coeff", 0.07, "config.moe_aux_loss_coeff"),
    experts("moe.z_loss_coeff", 0.003, "config.moe_z_loss_coeff"),
    experts("moe.dispatcher", "allgather", "dispatchers", ["MoEAllGatherTokenDispatcher"]),
    experts("moe.grouped_gemm", False, "experts", ["SequentialMLP"]),
    engine("muon")("train.optimizer", "muon", "optimizer.kinds", ["AdamW", "TensorParallelMuon"]),
    engine("momentum")("train.muon_momentum", 0.8, "optimizer.momentum"),
]

RAN = [
    engine("narrow")("model", "narrow", "hidden_size", 32),
    engine("device")("device", "npu", "error", Mentions("torch_npu is not installed")),
    run("seed", 99, "seed"),
    run("deterministic", True, "deterministic"),
    run("train.steps", 6, "steps", [1, 2, 3, 4, 5, 6]),
    run("train.micro_batch", 2, "trained.0"),
    run("data.seq_length", 24, "trained.1", 24),
    run("train.global_batch", 8, "samples"),
    run("train.eval_interval", 2, "validated", [2, 4, 6]),
    run("train.eval_batches", 3, "evaluated", 3 * 3 * 8 // 2),
    run("data.loader_workers", 2, "threads", Mentions("msllm-batches")),
    run("checkpoint.save_interval", 2, "checkpoints", ["step-00000004", "step-00000006"]),
    run("checkpoint.keep", 2, "checkpoints", ["step-00000004", "step-00000006"]),
    run("checkpoint.async_save", True, "queued"),
    run("checkpoint.export_hf", "last", "exported", ["step-00000006"]),
    run("log.interval", 3, "lines", 3),
    run("log.tensorboard", True, "tensorboard", 1),
    run("log.peak_tflops", 0.25, "peak_tflops", [0.25]),
    engine("resume")("checkpoint.resume", "STRAIGHT", "steps", [3, 4]),
]


def first_sample(config: RunConfig, validation: bool = False) -> Any:
    from msllm.engine.data.stream import open_streams

    streams = open_streams(config.data, config.seed, 300)
    stream = streams[validation]
    return None if stream is None else stream[0]


def is_second_data(sample: Any) -> bool:
    """Whether it is of the second data set, which alone has tokens of 150 and more."""
    return sample is not None and int(sample.tokens.max()) >= 150


def masked_tokens(config: RunConfig) -> list[int]:
    """Which tokens are not trained in the first sample."""
    from msllm.errors import InputError

    try:
        sample = first_sample(config)
    except InputError:
        return []
    return sorted(set(sample.tokens[1:][sample.loss_mask == 0].tolist()))


def prepared(config: RunConfig) -> tuple[Path, int, int]:
    """Where raw text was tokenized to, into how many tokens, by how many processes."""
    import multiprocessing

    from msllm.engine.data.cache import prepare_data
    from msllm.engine.data.indexed import IndexedTokens

    helpers: list[int] = []
    data = prepare_data(
        config.data, lambda report: helpers.append(len(multiprocessing.active_children()))
    )
    prefix = Path(data.paths[0])
    return prefix, int(IndexedTokens(prefix).lengths.sum()), max(helpers, default=0)


def agent(config: RunConfig) -> Any:
    """The launcher's agent for this machine, before it starts anything."""
    from msllm.engine.agent import Agent, RankLogs
    from msllm.engine.placement import Placement, placement

    place = placement({}, config.launch)
    if place.nodes == 1:
        place = Placement(1, 0, "127.0.0.1:29400", "")
    return Agent(["-c", ""], place, config.launch, RankLogs(Path("logs"), Path("errors"), {}))


def rendezvous(name: str) -> Callable[[RunConfig], Any]:
    return lambda config: getattr(agent(config)._worker_group.spec.rdzv_handler, name)


def seconds_to_save(config: RunConfig) -> int:
    """Time between a stop request and the kill, as the agent counts it."""
    import time

    one = agent(config)
    one.stop()
    one._forward_stops()
    return round(one._deadline - time.monotonic())


def refusals(config: RunConfig) -> str:
    """What the checks before a start say, on a machine with nothing in its environment."""
    from msllm.engine.preflight import check

    return "\n".join(map(str, check(config, {})))


def tracked(name: str) -> Callable[[RunConfig], Any]:
    """The project that a stand-in for a tracker's package is asked for."""

    def look(config: RunConfig) -> Any:
        from msllm.engine.training.run_folder import RunFolder
        from msllm.engine.training.sinks import open_sinks

        asked: list[str] = []
        package: Any = types.ModuleType(name)
        package.init = lambda **settings: asked.append(settings["project"]) or package
        package.finish = lambda: None
        assert config.out is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, name, package)
            open_sinks(config, RunFolder(config.out).create()).close()
        return asked

    return look


def trained_in(config: RunConfig) -> list[str]:
    """Where `msllm pretrain` leaves the run and its ranks' logs, from an empty working folder."""
    assert config.out is not None
    work = config.out.parent
    main = "from msllm.cli.app import main; main()"
    command = [sys.executable, "-c", main, "pretrain", "--model", config.model, "--data", "mock"]
    command += ["--device", "cpu", "--seq-length", "16", "--steps", "1", "--out", config.out.name]
    subprocess.run(
        command, cwd=work, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=900
    )
    return sorted(str(log.relative_to(work)) for log in work.glob("**/rank_*.log"))


MACHINES = {"launch.nodes": 2, "launch.node_rank": 0, "launch.rdzv_endpoint": "10.0.0.1:5"}
RAW = {"data.paths": ["RAW"], "data.tokenizer": "TOKENIZER", "data.cache_dir": "CACHE"}
HUGE = {"model": "llama3.1-405b"}

LOOKED_UP = [
    Arrival("seed", 99, lambda c: first_sample(c).tokens.tolist(), CHANGED),
    Arrival("backend", "fsdp2", refusals, Mentions("the FSDP2 backend is not part")),
    Arrival("checkpoint.init_from", "nowhere", refusals, Mentions("there is no folder")),
    Arrival("data.paths", ["SECOND"], lambda c: is_second_data(first_sample(c)), True),
    Arrival("data.valid_paths", ["SECOND"], lambda c: is_second_data(first_sample(c, True)), True),
    Arrival("data.valid_fraction", 0.3, lambda c: first_sample(c, True) is not None, True),
    Arrival("data.seq_length", 24, lambda c: len(first_sample(c).tokens), 25),
    Arrival(
        "data.shuffle",
        False,
        lambda c: first_sample(c).tokens.tolist(),
        [10] * 8 + [END] + [11] * 8,
    ),
    Arrival(
        "data.tokenizer", "TOKENIZER", masked_tokens, [END], given={"data.eod_mask_loss": True}
    ),
    Arrival(
        "data.eod_mask_loss", True, masked_tokens, [END], given={"data.tokenizer": "TOKENIZER"}
    ),
    Arrival("data.text_key", "body", lambda c: prepared(c)[1], 2 * (9 + 1), given=RAW),
    Arrival(
        "data.cache_dir",
        "ELSEWHERE",
        lambda c: "ELSEWHERE" in prepared(c)[0].parts,
        True,
        given=RAW,
    ),
    Arrival("data.workers", 2, lambda c: prepared(c)[2], 2, given=RAW),
    Arrival("launch.nodes", 3, rendezvous("world_size"), 3, given=MACHINES),
    Arrival("launch.node_rank", 1, rendezvous("rank"), 1, given=MACHINES),
    Arrival(
        "launch.rdzv_endpoint", "10.0.0.2:6", rendezvous("master_addr"), "10.0.0.2", given=MACHINES
    ),
    Arrival("launch.rdzv_timeout", 77, lambda c: rendezvous("timeout")(c).seconds, 77),
    Arrival("launch.stop_timeout", 5, seconds_to_save, 5),
    Arrival("out", "there", trained_in, ["there/logs/rank_0000.log"]),
    Arrival("launch.npus", 2, lambda c: agent(c)._worker_group.spec.local_world_size, 2),
    Arrival("launch.force", True, lambda c: "--force" in refusals(c), False, given=HUGE),
    Arrival("log.wandb_project", "mine", tracked("wandb"), ["mine"]),
    Arrival("log.swanlab_project", "mine", tracked("swanlab"), ["mine"]),
]

ARRIVALS = [*BUILT, *RAN, *LOOKED_UP]
