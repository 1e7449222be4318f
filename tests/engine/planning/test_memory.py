"""Memory by hand, by the parameter counts, and by what parallelism does to it."""

from __future__ import annotations

from typing import Any

import pytest

from msllm.config import RunConfig
from msllm.engine.layout import Layout
from msllm.engine.planning.memory import (
    PROCESS,
    estimate,
    in_flight,
    stage_parameters,
    three_ways_down,
)
from msllm.engine.planning.sizes import suggest_sizes
from msllm.models import counts
from msllm.models.architecture import Architecture, MoE
from msllm.models.resolve import resolve_model

SHAPE = {
    "model_type": "llama", "hidden_size": 8, "num_layers": 4, "num_attention_heads": 4,
    "num_query_groups": 2, "head_dim": 2, "intermediate_size": 12, "vocab_size": 10,
}  # fmt: skip


def shape(**changes: Any) -> Architecture:
    return Architecture(**{**SHAPE, **changes})


def run(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({"model": "m", **changes})


def planned(architecture: Architecture, world: int = 1, kind: str = "npu", **changes: Any):
    config = run(**changes)
    return estimate(architecture, Layout.from_world(config.layout, world), config, kind)


def test_a_small_model_by_hand():
    """4 layers: attention 8*(8+2*4)+8*8 = 192, MLP 3*8*12 = 288, norms 16; ends 80+8+80."""
    parameters = 4 * (192 + 288 + 16) + 80 + 8 + 80
    items = planned(shape(), dtype="fp32", data={"seq_length": 3}, train={"micro_batch": 2}).items
    assert items["parameters"] == parameters * 4
    assert items["gradients"] == parameters * 4
    assert items["main parameters"] == 0
    assert items["optimizer state"] == parameters * 8
    # a token and layer: norms' inputs and outputs 4*8, q k before and after rotary 2*(8+4), v 4,
    # attention's output 8, MLP 4*12; the last norm's input and output 2*8
    assert items["activations"] == 6 * 4 * (4 * (32 + 24 + 4 + 8 + 48) + 16)
    # logits that become their gradient in place, and the gradient of the head
    assert items["logits"] == (6 + 8) * 10 * 4
    # gradients of residual and branch, of product, gate and up, and of these two's weight; in
    # the place of the logits and of what the last norm kept
    inside = 6 * 4 * (16 + 36) + 4 * 8 * 24
    assert items["backward"] == inside - items["logits"] - 6 * 4 * 16
    assert items["communication"] == 0
    assert items["process"] == PROCESS["npu"]


def test_mixed_precision_keeps_float32_beside_bf16():
    items = planned(shape(), dtype="bf16").items
    parameters = items["parameters"] // 2
    assert items["gradients"] == items["main parameters"] == 4 * parameters
    assert items["optimizer state"] == 8 * parameters


@pytest.mark.parametrize("name", ["tiny-qwen3", "qwen3-8b", "qwen3-30b-a3b", "llama3.1-70b",
                                  "mixtral-8x7b", "qwen2.5-0.5b", "minicpm3-4b",
                                  "deepseek-v2-lite", "deepseek-v3"])  # fmt: skip
@pytest.mark.parametrize("sizes", [{}, {"pp": 4}, {"pp": 2, "vpp": 2}])
def test_stages_together_hold_every_parameter_once(name, sizes):
    architecture = resolve_model(name).architecture
    layout = Layout(**sizes)
    stages = [stage_parameters(architecture, layout, s) for s in range(layout.pp)]
    total = sum(stage["dense"] + stage["experts"] for stage in stages)
    count = counts.parameters(architecture)
    expected = count.total + count.mtp
    own_copy = architecture.tie_word_embeddings or architecture.num_nextn_predict_layers
    if own_copy and layout.pp > 1:  # on the last stage
        expected += architecture.vocab_size * architecture.hidden_size
    assert total == expected


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ranks_hold_every_parameter_once_but_norms(tp):
    architecture = resolve_model("qwen3-8b").architecture
    whole = stage_parameters(architecture, Layout(), 0)["dense"]
    part = stage_parameters(architecture, Layout(tp=tp), 0)["dense"]
    replicated = 36 * (2 * 4096 + 2 * 128) + 4096  # the layers' norms, QK norms, the last norm
    assert part == (whole - replicated) / tp + replicated


def test_tensor_parallel_ranks_hold_the_way_down_to_latents_whole():
    architecture = resolve_model("minicpm3-4b").architecture
    whole = stage_parameters(architecture, Layout(), 0)["dense"]
    part = stage_parameters(architecture, Layout(tp=2), 0)["dense"]
    latents = 2560 * (768 + 256 + 32) + 768 + 256
    replicated = 62 * (2 * 2560 + latents) + 2560
    assert part == (whole - replicated) / 2 + replicated


def test_tensor_parallel_ranks_hold_biases_of_what_they_sum_whole():
    biases = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}
    architecture = shape(**biases, num_query_groups=4)
    whole = stage_parameters(architecture, Layout(), 0)["dense"]
    part = stage_parameters(architecture, Layout(tp=2), 0)["dense"]
    replicated = 4 * (2 * 8 + 2 * 8) + 8  # norms, biases of attention's output and of down
    assert part == (whole - replicated) / 2 + replicated


def test_experts_are_spread():
    moe = MoE(num_experts=8, num_experts_per_tok=2, intermediate_size=12)
    architecture = shape(moe=moe)
    whole = stage_parameters(architecture, Layout(), 0)
    part = stage_parameters(architecture, Layout(ep=4, dp=4), 0)
    assert whole["experts"] == 4 * 8 * 3 * 8 * 12
    assert part["experts"] == whole["experts"] / 4
    assert part["dense"] == whole["dense"]


def test_the_distributed_optimizer_shards_its_state():
    one = planned(shape(), world=1).items
    four = planned(shape(), world=4).items
    off = planned(shape(), world=4, layout={"distributed_optimizer": False}).items
    for name in ("main parameters", "optimizer state"):
        assert four[name] == one[name] // 4
        assert off[name] == one[name]
    assert four["gradients"] == one["gradients"]


def test_expert_state_is_sharded_over_fewer_ranks():
    architecture = shape(moe=MoE(num_experts=8, num_experts_per_tok=2, intermediate_size=12))
    spread = planned(architecture, world=8, layout={"ep": 4})
    expected = spread.parameters["dense"] // 8 + spread.parameters["experts"] // 2
    assert spread.items["optimizer state"] == 8 * expected


@pytest.mark.parametrize(
    ("layout", "stage", "count", "held"),
    [
        (Layout(pp=4), 0, 100, 4),
        (Layout(pp=4), 3, 100, 1),
        (Layout(pp=4), 0, 2, 2),
        (Layout(), 0, 8, 1),
        (Layout(pp=4, vpp=2), 0, 100, 11),
        (Layout(pp=4, vpp=2), 3, 100, 5),
        (Layout(pp=2, vpp=2), 0, 1, 2),
    ],
)
def test_micro_batches_in_flight(layout, stage, count, held):
    assert in_flight(layout, stage, count) == held


def test_recompute_keeps_only_the_inputs_of_layers():
    def kept(**train: Any) -> tuple[int, int]:
        """Bytes of activations, and those that the backward pass needs more than without."""
        items, plain = (
            planned(shape(), dtype="bf16", data={"seq_length": 16}, train=settings).items
            for settings in (train, {})
        )
        return items["activations"], items["backward"] - plain["backward"]

    layer = 2 * 16 * (32 + 24 + 4 + 8 + 48)
    border = 2 * 16 * 8
    last, mlp, norms = 2 * border, 2 * 16 * 48, 2 * 16 * 16
    assert kept() == (4 * layer + last, 0)
    assert kept(recompute="full") == (4 * border + last, layer)
    assert kept(recompute="full", recompute_layers=2) == (2 * border + last, 2 * layer)
    for module, size in (("mlp", mlp), ("layernorm", norms)):
        found = kept(recompute="selective", recompute_modules=[module])
        assert found == (4 * (layer - size) + last, size)


def test_a_written_out_softmax_is_kept_unless_recomputed():
    """Scores of 4 layers, 16 queries, 4 heads and 16 keys: capped, softmax, and that rounded."""
    capped = shape(attention_softcap=50.0)

    def kept(architecture: Architecture, **train: Any) -> int:
        return planned(architecture, data={"seq_length": 16}, train=train).items["activations"]

    assert kept(capped) - kept(shape()) == 4 * 16 * 2 * 4 * 16 * 5
    assert kept(capped, recompute="selective") == kept(shape())


def test_sequence_parallelism_cuts_what_lies_between():
    """All activations of tp 2 are halves with it; without it the norms' are whole."""
    sizes = {"tp": 2}
    data = {"seq_length": 16}
    one = planned(shape(), data=data).items["activations"]
    cut = planned(shape(), world=2, layout=sizes, data=data).items["activations"]
    whole = planned(
        shape(), world=2, layout={**sizes, "sequence_parallel": False}, data=data
    ).items["activations"]
    assert cut == one / 2
    assert whole == one / 2 + 2 * 16 * (4 * 32 + 16) / 2


def test_the_fullest_stage_counts():
    """The first stage holds most micro-batches, the last one the logits."""
    train = {"global_batch": 64}
    long = planned(shape(), world=4, layout={"pp": 4}, data={"seq_length": 512}, train=train)
    assert long.stage == 0
    wide = planned(shape(vocab_size=100_000), world=4, layout={"pp": 4}, train=train)
    assert wide.stage == 3
    assert wide.items["logits"] > 0


def test_ways_down_name_smaller_figures():
    architecture = resolve_model("qwen3-8b").architecture
    config = run(layout={"tp": 2}, train={"micro_batch": 4})
    layout = Layout.from_world(config.layout, 8)
    now = estimate(architecture, layout, config, "npu").total / 2**30
    ways = three_ways_down(config, architecture, layout, "npu")
    assert len(ways) == 3
    for way in ways:
        assert float(way.rsplit(":")[1].removesuffix(" GiB")) < now
    assert any("--micro-batch 2" in w or "--recompute full" in w for w in ways)


def test_there_are_always_three_ways():
    ways = three_ways_down(run(), shape(num_attention_heads=1, num_query_groups=1), Layout(), "cpu")
    assert len(ways) == 3


# --- sizes ------------------------------------------------------------------------------------


def suggested(name: str, npus: int, nodes: int = 1, fixed: dict[str, int] | None = None,
              budget: int = 56 << 30) -> dict[str, int]:  # fmt: skip
    config = run(layout=fixed or {}, launch={"npus": npus, "nodes": nodes})
    architecture = resolve_model(name).architecture
    return suggest_sizes(config, architecture, set(fixed or {}), "npu", budget)


def test_a_small_model_is_not_split():
    assert suggested("tiny-qwen3", 8) == {"tp": 1, "pp": 1, "ep": 1}


@pytest.mark.parametrize(("name", "npus", "nodes"), [
    ("qwen3-8b", 8, 1), ("qwen3-32b", 8, 2), ("llama3.1-70b", 8, 8), ("qwen3-30b-a3b", 8, 2),
])  # fmt: skip
def test_a_large_model_is_split_until_it_fits(name, npus, nodes):
    sizes = suggested(name, npus, nodes)
    architecture = resolve_model(name).architecture
    config = run(layout=sizes)
    layout = Layout.from_world(config.layout, npus * nodes)
    assert layout.problems(architecture) == []
    assert layout.world_size == npus * nodes
    assert sizes["tp"] <= npus
    assert estimate(architecture, layout, config, "npu").total <= 56 << 30


def test_what_is_fixed_stays():
    assert suggested("qwen3-32b", 8, 2, {"tp": 4})["tp"] == 4
    assert suggested("tiny-qwen3", 8, 1, {"tp": 2, "pp": 2}) == {"tp": 2, "pp": 2, "ep": 1}


def test_what_never_fits_is_split_as_far_as_it_helps():
    sizes = suggested("llama3.1-405b", 8, 1, budget=1 << 30)
    assert sizes["tp"] * sizes["pp"] == 8


def test_illegal_fixed_sizes_suggest_nothing():
    assert suggested("tiny-qwen3", 3, 1, {"tp": 3}) == {}
