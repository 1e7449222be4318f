"""Reads whole parameters out of the files of ranks, whatever layout they were written at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from msllm.engine.layout import Layout
from msllm.engine.weights.rank_files import EMBEDDING, Rank, RankFiles
from msllm.engine.weights.rank_parts import HEAD, Held, RankParts
from msllm.engine.weights.slice import Slice
from msllm.engine.weights.stored import FUSED_NORMS, READABLE
from msllm.engine.weights.torch_dist import StoredTensor
from msllm.errors import InputError, Problem
from msllm.models.architecture import Architecture
from msllm.models.weight_map import Run, Weight, WeightMap

SHOWN = 6
NO_WEIGHTS = ("inv_freq", "local_tokens_per_expert")
"""Ends of names of tensors that a model makes by itself."""

_Wanted = tuple[str, int, tuple[tuple[int, int], ...]]


class RankWeights:
    """The parameters of a model whose ranks' files these are.

    Attributes:
        tensors: Shape, without rows that pad the vocabulary, and type of each.
        warnings: Which parameters are not the same in all files that have them, in sentences.

    Raises:
        InputError: Files are missing, or they are not those of the model.
    """

    def __init__(self, files: RankFiles, weights: WeightMap, architecture: Architecture):
        self._weights = weights
        parts = RankParts(weights, architecture, *_layout(files, architecture))
        self._parts: dict[str, list[tuple[Slice, Tensor]]] = {name: [] for name in weights}
        parts.check()
        problems = self._collect(files, parts)
        if problems:
            if len(problems) > SHOWN:
                more = f"and {len(problems) - SHOWN} more of that kind"
                problems[SHOWN:] = [Problem(more, str(files.folder))]
            raise InputError(problems)
        self.layout = parts.layout
        self.tensors = {
            name: StoredTensor(weight.shape, _widest(self._parts[name]))
            for name, weight in weights.items()
        }
        self.files: list[Path] = list(files.paths.values())
        self._sizes = {path: path.stat().st_size for path in self.files}

    def dtype(self, name: str) -> torch.dtype:
        """A parameter's type."""
        return self.tensors[name].dtype

    def rows(self, run: Run) -> Tensor:
        """Rows of a parameter, those of a map from `as_they_are`.

        Raises:
            InputError: A file has become shorter; mapped as it is, reading it would kill us.
        """
        for path, size in self._sizes.items():
            if not path.is_file() or path.stat().st_size < size:
                raise InputError("it is shorter than it was at the start", str(path))
        width = self._weights[run.tensor].width
        first = (run.first,) if width is None else (run.first, 0)
        sizes = (run.count,) if width is None else (run.count, width)
        out = torch.empty(sizes, dtype=self.dtype(run.tensor))
        for part, values in self._parts[run.tensor]:
            for mine, theirs in part.overlaps(first, sizes):
                out[theirs] = values[mine]
        return out

    def tensor(self, name: str) -> Tensor:
        """A whole parameter."""
        return self.rows(Run(name, 0, self._weights[name].rows))

    def _collect(self, files: RankFiles, parts: RankParts) -> list[Problem]:
        """Find each part in one of the files that have it; list what is wrong."""
        seen: dict[_Wanted, Tensor | None] = {}
        absent: dict[_Wanted, Rank] = {}
        differing: dict[str, str] = {}
        problems = []
        for rank in parts.ranks:
            model = _Model(files, rank) if rank in files.models else None
            for held in parts.held(rank):
                key = (held.slice.name, held.slice.axis, held.slice.runs)
                if model is None:
                    absent.setdefault(key, rank)
                    continue
                found = model.take(held, parts)
                if isinstance(found, Problem):
                    problems.append(found)
                    seen.setdefault(key, None)
                    continue
                first = seen.get(key)
                if first is None:
                    self._parts[held.slice.name].append((held.slice, found))
                    seen[key] = found
                elif not _same(first, found):
                    differing.setdefault(held.slice.name, model.label)
            if model is not None:
                problems += model.left(parts.architecture.tie_word_embeddings)
        self.warnings = tuple(
            f"{name} in {label} is not as in the files before, whose values are taken"
            for name, label in differing.items()
        )
        lost = dict.fromkeys(rank for key, rank in absent.items() if key not in seen)
        return [*(files.missing(rank) for rank in lost), *problems]


def _widest(parts: list[tuple[Slice, Tensor]]) -> torch.dtype:
    types = [values.dtype for _, values in parts]
    return reduce(torch.promote_types, types)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two files have the same numbers, bit by bit: what is no number equals itself."""
    if one.dtype != other.dtype:
        return False
    a, b = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    return torch.equal(a, b)


def as_they_are(weights: WeightMap) -> WeightMap:
    """A map of parameters to themselves, for sources that already have Megatron's names."""
    return {name: Weight((Run(name, 0, w.rows),), w.width) for name, w in weights.items()}


def _layout(files: RankFiles, architecture: Architecture) -> tuple[Layout, int]:
    """Read the layout, and how long the padded vocabulary is, from the files."""
    counts = []
    for chunk in range(files.vpp):
        for stage in range(files.pp):
            ranks = [rank for rank in files.models if rank.pp == stage]
            models = files.models[ranks[0]] if ranks else []
            counts.append(_layers(models[chunk]) if chunk < len(models) else 0)
    if sum(counts) != architecture.num_layers:
        raise InputError(
            f"the files have {sum(counts)} layers and the model {architecture.num_layers}",
            str(files.folder),
            "give the config of that model; if it is, files of the last ranks are missing",
        )
    tables = [models[0].get(EMBEDDING) for rank, models in files.models.items() if rank.pp == 0]
    table = next((t for t in tables if t is not None), None)
    if table is None or table.dim() != 2:
        raise InputError(f"no file has a matrix {EMBEDDING}", str(files.folder))
    layout = Layout(
        tp=files.tp,
        pp=files.pp,
        vpp=files.vpp,
        ep=files.ep,
        etp=_expert_tensor_ranks(files, architecture),
        pp_layout=tuple(counts),
    )
    if architecture.moe is not None and architecture.moe.num_experts % files.ep:
        raise InputError(
            f"files of {files.ep} expert ranks can't hold {architecture.moe.num_experts} experts",
            str(files.folder),
            "files are missing, or it is another model",
        )
    return layout, len(table) * files.tp


def _layers(model: dict[str, Tensor]) -> int:
    found = (re.match(r"decoder\.layers\.(\d+)\.", name) for name in model)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _expert_tensor_ranks(files: RankFiles, architecture: Architecture) -> int:
    """Whether experts are cut too: 1 where each rank's are whole."""
    if architecture.moe is None:
        return 1
    whole = architecture.moe.intermediate_size * (2 if architecture.gated_mlp else 1)
    models = [model for models in files.models.values() for model in models]
    for name, tensor in ((n, t) for model in models for n, t in model.items()):
        if tensor.dim() != 2:
            continue
        if re.search(r"\.experts\..*linear_fc1\.weight\d*$", name):
            return 1 if len(tensor) == whole else files.tp
        if name.endswith(".experts.weight1"):
            experts = architecture.moe.num_experts // files.ep
            return 1 if tensor.size(1) == whole * experts else files.tp
    return files.tp


@dataclass(slots=True)
class _Model:
    """A rank's file, of which parameters are taken."""

    files: RankFiles
    rank: Rank
    _used: set[tuple[int, str]] = field(default_factory=set)

    @property
    def label(self) -> str:
        """Name of its folder."""
        return self.files.label(self.rank)

    @property
    def _where(self) -> str:
        return str(self.files.folder / self.label)

    def take(self, held: Held, parts: RankParts) -> Tensor | Problem:
        """A parameter, as a linear holds it; or what is wrong with it."""
        chunks = self.files.models[self.rank]
        for name in _spellings(held.name):
            if held.chunk < len(chunks) and name in chunks[held.chunk]:
                self._used.add((held.chunk, name))
                values = _picked(chunks[held.chunk][name], held.name, name, parts)
                if values is None or tuple(values.shape) != held.slice.shape:
                    theirs = list(chunks[held.chunk][name].shape)
                    ours = list(held.slice.shape)
                    problem = f"{name} is {theirs}, which does not fit {ours} of the model"
                    return Problem(problem, self._where)
                if str(values.dtype) not in READABLE:
                    problem = f"{name} is stored as {values.dtype}"
                    return Problem(problem, self._where, "floats only are weights")
                return values
        return Problem(f"the model has {held.name}, and the file does not", self._where)

    def left(self, tied: bool) -> Iterator[Problem]:
        """Parameters that the model does not have."""
        for chunk, model in enumerate(self.files.models[self.rank]):
            for name in model:
                spare = name.endswith(NO_WEIGHTS) or (tied and name == HEAD)
                if (chunk, name) not in self._used and not spare:
                    problem = f"the file has {name}, and the model does not"
                    yield Problem(problem, self._where)


def _spellings(name: str) -> Iterator[str]:
    """Names that a parameter may have: its own, fused with a norm, grouped with other experts."""
    yield name
    for ours, theirs in FUSED_NORMS.items():
        if f".{ours}" in name:
            yield name.replace(f".{ours}", f".{theirs}")
    expert = re.fullmatch(r"(.+\.experts\.)local_experts\.(\d+)\.linear_fc([12])\.weight", name)
    if expert is not None:
        yield f"{expert[1]}weight{expert[3]}"
        yield f"{expert[1]}linear_fc{expert[3]}.weight{expert[2]}"


def _picked(values: Tensor, name: str, found: str, parts: RankParts) -> Tensor | None:
    """One expert of a grouped weight, `[out, in]`; anything else as it is.

    Grouped, weight1 is `[hidden, experts * out]` and weight2 `[experts * in, hidden]`, of which
    Megatron's matmul takes each expert's `[in, out]` as they lie in memory.
    """
    if not found.endswith((".weight1", ".weight2")) or ".linear_fc" in found:
        return values
    assert parts.architecture.moe is not None
    local = parts.architecture.moe.num_experts // parts.layout.ep
    hidden = parts.architecture.hidden_size
    shape = (local, hidden, -1) if found.endswith("1") else (local, -1, hidden)
    if values.numel() % (local * hidden):
        return None
    number = re.search(r"local_experts\.(\d+)\.", name)
    assert number is not None
    return values.reshape(shape)[int(number[1])].t()
