"""Layout: how a model is spread over the devices of a job. Pure integers, no torch.

Says which parallel sizes are legal, which transformer layers live where, and which place in the
grid a rank has. Ranks are numbered as Megatron-core numbers them: tensor parallel fastest, then
context, data and pipeline parallel.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from msllm.config import LayoutConfig
from msllm.errors import Problem
from msllm.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place: its number in each group."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel sizes: tensor, pipeline, virtual pipeline, context, expert, expert tensor, data.

    Attributes:
        pp_layout: Transformer layers of each pipeline chunk in order; None for a balanced split.
        sequence_parallel: Whether norms and residuals are cut along the sequence over `tp`.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    pp_layout: tuple[int, ...] | None = None
    sequence_parallel: bool = False

    @classmethod
    def from_world(cls, config: LayoutConfig, world_size: int) -> Layout:
        """Lay out `world_size` processes; what is left of them is data parallel.

        Call `divides` first: here the sizes must fit.
        """
        model = config.tp * config.pp * config.cp
        sequence_parallel = config.sequence_parallel
        return cls(
            tp=config.tp,
            pp=config.pp,
            vpp=config.vpp,
            cp=config.cp,
            ep=config.ep,
            etp=config.etp,
            dp=max(1, world_size // model),
            pp_layout=tuple(config.pp_layout) if config.pp_layout else None,
            sequence_parallel=config.tp > 1 if sequence_parallel is None else sequence_parallel,
        )

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def num_chunks(self) -> int:
        """Pipeline chunks in all: `pp * vpp`."""
        return self.pp * self.vpp

    def chunks(self, num_layers: int) -> tuple[range, ...]:
        """Layers of each pipeline chunk in the order of the model; every layer exactly once.

        Where the layers don't divide, the first and the last chunk, which also hold the embedding
        and the head, get fewer.
        """
        counts = self.pp_layout or _balanced(num_layers, self.num_chunks)
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        return tuple(range(a, b) for a, b in itertools.pairwise(starts))

    def stages(self, num_layers: int) -> tuple[tuple[range, ...], ...]:
        """Layers of each stage, chunk by chunk: stage `p` holds chunks `p`, `pp + p`, ..."""
        chunks = self.chunks(num_layers)
        return tuple(chunks[stage :: self.pp] for stage in range(self.pp))

    def megatron_stages(self, num_layers: int, further: int = 0) -> list[list[str]]:
        """Name the layers of each chunk, as Megatron's `pipeline_model_parallel_layout` does.

        The `further` layers of multi-token prediction are in the last chunk.
        """
        lists = [["decoder"] * len(layers) for layers in self.chunks(num_layers)]
        lists[0].insert(0, "embedding")
        lists[-1] += ["mtp"] * further + ["loss"]
        return lists

    def coordinates(self, rank: int) -> Coordinates:
        """Place of a global rank in Megatron's order (tp-cp-ep-dp-pp)."""
        per_stage = self.tp * self.cp * self.dp
        within = rank % per_stage
        return Coordinates(
            tp=within % self.tp,
            cp=within // self.tp % self.cp,
            dp=within // (self.tp * self.cp),
            pp=rank // per_stage,
            etp=within % self.etp,
            ep=within // self.etp % self.ep,
        )

    def problems(self, architecture: Architecture) -> list[Problem]:
        """List what Megatron can't do with this model at this layout, and what would work."""
        found = [*_heads(self, architecture), *_widths(self, architecture)]
        if self.sequence_parallel and self.tp == 1:
            found.append(
                Problem(
                    "sequence parallelism needs tensor parallelism",
                    "layout.sequence_parallel",
                    "use --tp 2 or more, or leave it unset",
                )
            )
        found += [*_experts(self, architecture), *_pipeline(self, architecture.num_layers)]
        return found


def divides(config: LayoutConfig, world_size: int) -> list[Problem]:
    """Whether the parallel sizes make up the number of processes."""
    model = config.tp * config.pp * config.cp
    found = []
    if world_size % model:
        found.append(
            Problem(
                f"tensor x pipeline x context parallel = {config.tp} x {config.pp} x {config.cp} "
                f"= {model} does not divide the {world_size} processes",
                "--tp --pp --cp",
                f"their product must divide {world_size}: "
                f"it may be {_either(_divisors(world_size))}",
            )
        )
    experts = config.etp * config.ep * config.pp
    if config.ep * config.etp > 1 and world_size % experts:
        found.append(
            Problem(
                f"expert tensor x expert x pipeline parallel = {config.etp} x {config.ep} x "
                f"{config.pp} = {experts} does not divide the {world_size} processes",
                "--ep --etp --pp",
                f"their product must divide {world_size}",
            )
        )
    return found


def _balanced(num_layers: int, chunks: int) -> tuple[int, ...]:
    base, extra = divmod(num_layers, chunks)
    counts = [base] * chunks
    inner_first = sorted(range(chunks), key=lambda i: (i in (0, chunks - 1), i == chunks - 1, i))
    for index in inner_first[:extra]:
        counts[index] += 1
    return tuple(counts)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _either(numbers: list[int]) -> str:
    """Put numbers as "1, 2 or 4"."""
    if len(numbers) == 1:
        return str(numbers[0])
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def _heads(layout: Layout, architecture: Architecture) -> list[Problem]:
    heads, groups = architecture.num_attention_heads, architecture.num_query_groups
    if heads == 0:  # no attention at all
        return []
    shared = architecture.qk_norm != "full"  # whether ranks may have copies of one key head
    legal = [t for t in _divisors(heads) if groups % t == 0 or (shared and t % groups == 0)]
    if layout.tp in legal:
        return []
    if heads % layout.tp:
        what = f"the {heads} attention heads"
    elif shared:
        what = f"the {groups} key-value heads, nor is it a multiple of them"
    else:
        what = f"the {groups} key-value heads, over which there is one norm"
    return [
        Problem(
            f"tensor parallel size {layout.tp} does not divide {what}",
            f"--tp {layout.tp}",
            f"use {_either(legal)}",
        )
    ]


def _widths(layout: Layout, architecture: Architecture) -> list[Problem]:
    dense = any(not architecture.has_experts(i) for i in range(architecture.num_layers))
    shared = architecture.moe.shared_expert_intermediate_size if architecture.moe else 0
    widths = {
        "the MLP's width": architecture.intermediate_size if dense else 0,
        "the shared experts' width": shared,
    }
    return [
        Problem(
            f"tensor parallel size {layout.tp} does not divide {what} {width}",
            f"--tp {layout.tp}",
            f"use a divisor of {width}",
        )
        for what, width in widths.items()
        if width % layout.tp
    ]


def _experts(layout: Layout, architecture: Architecture) -> list[Problem]:
    moe = architecture.moe
    if moe is None:
        if layout.ep == layout.etp == 1:
            return []
        return [
            Problem(
                f"{architecture.model_type} models have no experts to spread",
                "--ep --etp",
                "leave --ep and --etp at 1",
            )
        ]
    found = []
    if moe.num_experts % layout.ep:
        found.append(
            Problem(
                f"expert parallel size {layout.ep} does not divide the {moe.num_experts} experts",
                f"--ep {layout.ep}",
                f"use {_either(_divisors(moe.num_experts))}",
            )
        )
    if moe.intermediate_size % layout.etp:
        found.append(
            Problem(
                f"expert tensor parallel size {layout.etp} does not divide the experts' width "
                f"{moe.intermediate_size}",
                f"--etp {layout.etp}",
                f"use a divisor of {moe.intermediate_size}",
            )
        )
    if moe.expert_linear_bias and layout.etp > 1:
        found.append(
            Problem(
                "experts with biases can't be cut by tensor parallelism",
                f"--etp {layout.etp}",
                "leave --etp at 1",
            )
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        found.append(
            Problem(
                "experts with tensor parallelism need sequence parallelism",
                "layout.sequence_parallel",
                "leave layout.sequence_parallel unset, or use --tp 1",
            )
        )
    return found


def _pipeline(layout: Layout, num_layers: int) -> list[Problem]:
    found = []
    if layout.vpp > 1 and layout.pp == 1:
        found.append(
            Problem(
                f"virtual pipeline size {layout.vpp} needs a pipeline",
                f"--vpp {layout.vpp}",
                "use --pp 2 or more, or --vpp 1",
            )
        )
    if layout.num_chunks > num_layers:
        found.append(
            Problem(
                f"{layout.num_chunks} pipeline chunks (pp {layout.pp} x vpp {layout.vpp}) are more "
                f"than the {num_layers} layers",
                "--pp --vpp",
                f"pp x vpp may be at most {num_layers}",
            )
        )
    counts = layout.pp_layout
    if counts is not None and (len(counts) != layout.num_chunks or sum(counts) != num_layers):
        example = ",".join(map(str, _balanced(num_layers, layout.num_chunks)))
        found.append(
            Problem(
                f"layout.pp_layout {list(counts)} has {len(counts)} chunks and {sum(counts)} "
                f"layers; the model has {layout.num_chunks} chunks and {num_layers} layers",
                "layout.pp_layout",
                f"for example [{example}]",
            )
        )
    return found
