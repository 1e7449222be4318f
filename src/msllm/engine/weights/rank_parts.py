"""What each model rank of a layout holds, as arithmetic: no process group and no model is needed.

Which way a parameter is cut is Megatron's choice and written down here; the tests hold it against
the models that Megatron builds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from msllm.engine.layout import Layout
from msllm.engine.weights.rank_files import EMBEDDING, Rank
from msllm.engine.weights.slice import Slice, rows_held
from msllm.errors import InputError
from msllm.models.architecture import Architecture
from msllm.models.weight_map import Weight, WeightMap

HEAD = "output_layer.weight"
VOCABULARY = (EMBEDDING, HEAD, "output_layer.bias")
"""Parameters with a row for each token."""
BY_ROWS = re.compile(r".*\.(word_embeddings|linear_qkv|linear_fc1)\.(weight|bias)|output_layer\..+")
BY_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
WHOLE = re.compile(
    r".*(norm\.(weight|bias)|\.(linear_proj|linear_fc2)\.bias|\.router\..+|\.gate_weight)"
)


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter of a rank.

    Attributes:
        chunk: Which of the rank's pipeline chunks has it.
        name: Its name there, with local numbers of layers and experts.
        slice: Which part of which whole parameter it is.
    """

    chunk: int
    name: str
    slice: Slice


@dataclass(frozen=True, slots=True)
class RankParts:
    """How a model's parameters are spread over the ranks of a layout.

    Attributes:
        vocabulary: Rows of the embedding table, padding included.
    """

    weights: WeightMap
    architecture: Architecture
    layout: Layout
    vocabulary: int

    @property
    def ranks(self) -> list[Rank]:
        """All model ranks."""
        sizes = self.layout
        return [
            Rank(t, p, e) for p in range(sizes.pp) for e in range(sizes.ep) for t in range(sizes.tp)
        ]

    def held(self, rank: Rank) -> Iterator[Held]:
        """List what a rank holds.

        Raises:
            InputError: It is not known how one of the parameters is spread.
        """
        chunks = self.layout.stages(self.architecture.num_layers)[rank.pp]
        for name, weight in self.weights.items():
            place = self._place(name, rank, chunks)
            if place is not None:
                yield Held(*place, self._slice(name, weight, rank))
        tied = self.architecture.tie_word_embeddings
        if tied and rank.pp == self.layout.pp - 1 and self.layout.num_chunks > 1:
            # the last stage has no embedding, and so a copy of its own
            part = self._slice(EMBEDDING, self.weights[EMBEDDING], rank)
            yield Held(len(chunks) - 1, HEAD, part)

    def _place(self, name: str, rank: Rank, chunks: tuple[range, ...]) -> tuple[int, str] | None:
        """The chunk and local name that a parameter has on a rank; None if it is elsewhere."""
        layer = re.fullmatch(r"(decoder\.layers\.)(\d+)(\..+)", name)
        if layer is None:
            if name.startswith("embedding."):
                return (0, name) if rank.pp == 0 else None
            return (len(chunks) - 1, name) if rank.pp == self.layout.pp - 1 else None
        number, rest = int(layer[2]), layer[3]
        expert = re.fullmatch(r"(.+\.local_experts\.)(\d+)(\..+)", rest)
        if expert is not None:
            assert self.architecture.moe is not None
            local = self.architecture.moe.num_experts // self.layout.ep
            if int(expert[2]) // local != rank.ep:
                return None
            rest = f"{expert[1]}{int(expert[2]) % local}{expert[3]}"
        for index, layers in enumerate(chunks):
            if number in layers:
                return index, f"{layer[1]}{number - layers.start}{rest}"
        return None

    def check(self) -> None:
        """Refuse a model with parameters of which it is not known how they are spread.

        Raises:
            InputError: It is one.
        """
        for name, weight in self.weights.items():
            self._slice(name, weight, Rank(0, 0, 0))

    def _is_norm_of_all_heads(self, name: str) -> bool:
        whole = self.architecture.qk_norm == "full"
        return whole and name.endswith((".q_layernorm.weight", ".k_layernorm.weight"))

    def _slice(self, name: str, weight: Weight, rank: Rank) -> Slice:
        tp, t = self.layout.tp, rank.tp
        if ".experts." in name and self.layout.etp == 1:
            tp, t = 1, 0
        rows = self.vocabulary if name in VOCABULARY else weight.rows
        width = weight.width or 0
        if BY_ROWS.fullmatch(name) or self._is_norm_of_all_heads(name):
            return Slice(name, 0, width, rows_held(rows // tp, t, tp, ".linear_fc1." in name))
        if BY_COLUMNS.fullmatch(name):
            columns = width // tp
            return Slice(name, 1, rows, ((t * columns, columns),))
        if WHOLE.fullmatch(name):
            return Slice(name, 0, width, ((0, rows),))
        raise InputError(
            f"how tensor parallelism cuts {name} is not known",
            self.architecture.model_type,
            "models with such parameters are not exchanged with MindSpeed-LLM yet",
        )
