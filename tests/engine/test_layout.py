"""Layouts against Megatron-core's own rank generator, layer layout and TransformerConfig."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig

from msllm.config import LayoutConfig
from msllm.engine.layout import Layout, divides
from msllm.models.architecture import Architecture, MoE

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_layers": 8,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "head_dim": 8,
    "intermediate_size": 96,
    "vocab_size": 100,
}


def shape(**changes) -> Architecture:
    return Architecture(**{**SHAPE, **changes})


sizes = st.sampled_from([1, 2, 3, 4])


# --- layers of stages -------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(layers=st.integers(1, 100), pp=st.integers(1, 16), vpp=st.integers(1, 4))
def test_every_layer_is_on_exactly_one_stage(layers, pp, vpp):
    layout = Layout(pp=pp, vpp=vpp)
    chunks = layout.chunks(layers)
    assert len(chunks) == pp * vpp
    assert [i for chunk in chunks for i in chunk] == list(range(layers))
    counts = [len(chunk) for chunk in chunks]
    assert max(counts) - min(counts) <= 1
    # the ends also hold the embedding and the head: they never have more than the others
    assert counts[0] == min(counts) or layers % len(counts) == len(counts) - 1
    assert counts[-1] <= min(counts[:-1] or counts)
    stages = layout.stages(layers)
    assert sorted(i for stage in stages for chunk in stage for i in chunk) == list(range(layers))


@settings(max_examples=100, deadline=None)
@given(layers=st.integers(1, 60), pp=st.integers(1, 8), vpp=st.integers(1, 3))
def test_megatron_reads_the_same_layers_from_our_list(layers, pp, vpp):
    layout = Layout(pp=pp, vpp=vpp)
    theirs = PipelineParallelLayerLayout(layout.megatron_stages(layers), pp)
    assert theirs.virtual_pipeline_model_parallel_size == vpp
    theirs.validate_layer_layout(layers, 0)
    for p, stage in enumerate(layout.stages(layers)):
        offsets = [
            sum(
                theirs.layout[q][w].count(LayerType.decoder)
                for w in range(v + 1)
                for q in range(pp if w < v else p)
            )
            for v in range(vpp)
        ]
        counts = [theirs.layout[p][v].count(LayerType.decoder) for v in range(vpp)]
        found = [list(range(o, o + c)) for o, c in zip(offsets, counts, strict=True)]
        assert found == [list(chunk) for chunk in stage]


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "counts"),
    [
        (30, 4, 1, [7, 8, 8, 7]),
        (80, 16, 2, [2, *[3] * 16, *[2] * 15]),
        (7, 2, 1, [4, 3]),
        (36, 5, 1, [7, 8, 7, 7, 7]),
    ],
)
def test_layers_that_do_not_divide_are_balanced(layers, pp, vpp, counts):
    assert [len(c) for c in Layout(pp=pp, vpp=vpp).chunks(layers)] == counts


def test_a_given_split_is_kept():
    layout = Layout(pp=2, vpp=2, pp_layout=(1, 3, 2, 1))
    assert layout.problems(shape(num_layers=7)) == []
    assert layout.stages(7) == ((range(0, 1), range(4, 6)), (range(1, 4), range(6, 7)))


# --- the grid of ranks ------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(tp=sizes, cp=sizes, dp=sizes, pp=sizes)
def test_coordinates_are_megatrons(tp, cp, dp, pp):
    layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp)
    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    for axis in ("tp", "cp", "dp", "pp"):
        for ranks in generator.get_ranks(axis):
            assert [getattr(layout.coordinates(r), axis) for r in ranks] == list(range(len(ranks)))
    places = {layout.coordinates(r) for r in range(layout.world_size)}
    assert len({(c.tp, c.cp, c.dp, c.pp) for c in places}) == layout.world_size


@settings(max_examples=60, deadline=None)
@given(etp=sizes, ep=sizes, edp=sizes, pp=sizes)
def test_expert_coordinates_are_megatrons(etp, ep, edp, pp):
    world = etp * ep * edp * pp
    layout = Layout(dp=world // pp, pp=pp, ep=ep, etp=etp)
    generator = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    for axis, name in (("tp", "etp"), ("ep", "ep")):
        for ranks in generator.get_ranks(axis):
            assert [getattr(layout.coordinates(r), name) for r in ranks] == list(range(len(ranks)))


def test_what_is_left_of_the_world_is_data_parallel():
    layout = Layout.from_world(LayoutConfig(tp=2, pp=2), 16)
    assert (layout.dp, layout.world_size) == (4, 16)
    assert layout.sequence_parallel
    assert not Layout.from_world(LayoutConfig(), 1).sequence_parallel
    assert not Layout.from_world(LayoutConfig(tp=2, sequence_parallel=False), 2).sequence_parallel


# --- what is refused --------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    tp=st.integers(1, 12),
    heads=st.sampled_from([6, 8, 12, 16]),
    groups=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
)
def test_tensor_parallel_sizes_are_refused_where_megatron_refuses_them(tp, heads, groups):
    if heads % groups:
        return
    problems = Layout(tp=tp, sequence_parallel=tp > 1).problems(
        shape(num_attention_heads=heads, num_query_groups=groups, intermediate_size=27720)
    )
    try:
        TransformerConfig(
            num_layers=8,
            hidden_size=heads * 8,
            num_attention_heads=heads,
            num_query_groups=groups,
            tensor_model_parallel_size=tp,
        )
        legal = heads % tp == 0
    except (ValueError, AssertionError):
        legal = False
    assert (problems == []) == legal


def test_heads_name_the_legal_sizes():
    (problem,) = Layout(tp=3).problems(shape())
    assert problem.problem == "tensor parallel size 3 does not divide the 8 attention heads"
    assert problem.where == "--tp 3"
    assert problem.hint == "use 1, 2, 4 or 8"


def test_key_value_heads_count_too():
    (problem,) = Layout(tp=4).problems(
        shape(num_attention_heads=12, num_query_groups=6, intermediate_size=96)
    )
    assert "6 key-value heads" in problem.problem
    assert problem.hint == "use 1, 2, 3, 6 or 12"


def test_mlp_width():
    (problem,) = Layout(tp=8).problems(shape(intermediate_size=100))
    assert "MLP's width 100" in problem.problem


def test_one_norm_over_all_keys_wants_a_key_head_a_rank():
    (problem,) = Layout(tp=8).problems(shape(qk_norm="full"))
    assert "the 4 key-value heads, over which there is one norm" in problem.problem
    assert problem.hint == "use 1, 2 or 4"
    assert Layout(tp=8).problems(shape(qk_norm="head")) == []
    assert Layout(tp=4).problems(shape(qk_norm="full")) == []


def test_shared_experts_width():
    moe = replace(MOE, shared_expert_intermediate_size=90)
    (problem,) = Layout(tp=4, sequence_parallel=True).problems(shape(moe=moe))
    assert "the shared experts' width 90" in problem.problem


def test_experts_with_biases_are_whole():
    (problem,) = Layout(etp=2, dp=2).problems(shape(moe=replace(MOE, expert_linear_bias=True)))
    assert problem.hint == "leave --etp at 1"


MOE = MoE(num_experts=6, num_experts_per_tok=2, intermediate_size=48)


@pytest.mark.parametrize(
    ("layout", "texts"),
    [
        (Layout(ep=4, dp=4), ["expert parallel size 4 does not divide the 6 experts"]),
        (Layout(etp=5, dp=5), ["expert tensor parallel size 5 does not divide"]),
        (Layout(tp=2), ["experts with tensor parallelism need sequence parallelism"]),
        (Layout(ep=3, dp=3), []),
        (Layout(tp=2, sequence_parallel=True), []),
    ],
)
def test_experts(layout, texts):
    found = [p.problem for p in layout.problems(shape(moe=MOE))]
    assert len(found) == len(texts)
    assert all(text in problem for text, problem in zip(texts, found, strict=True))


def test_sequence_parallelism_needs_tensor_parallelism():
    (problem,) = Layout(sequence_parallel=True).problems(shape())
    assert problem.problem == "sequence parallelism needs tensor parallelism"
    with pytest.raises(ValueError, match="sequence parallelism without tensor parallelism"):
        TransformerConfig(num_layers=1, num_attention_heads=1, sequence_parallel=True)


def test_dense_models_have_no_experts_to_spread():
    (problem,) = Layout(ep=2, dp=2).problems(shape())
    assert "no experts" in problem.problem


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(vpp=2), "virtual pipeline size 2 needs a pipeline"),
        (Layout(pp=3, vpp=3), "9 pipeline chunks (pp 3 x vpp 3) are more than the 8 layers"),
        (Layout(pp=2, pp_layout=(3, 4)), "has 2 chunks and 7 layers"),
        (Layout(pp=2, pp_layout=(3, 4, 1)), "has 3 chunks and 8 layers"),
    ],
)
def test_pipelines(layout, text):
    assert any(text in problem.problem for problem in layout.problems(shape()))


def test_all_problems_at_once():
    assert len(Layout(tp=3, pp=9).problems(shape(intermediate_size=100))) == 3


@pytest.mark.parametrize(
    ("config", "world", "count"),
    [
        (LayoutConfig(tp=2, pp=2), 8, 0),
        (LayoutConfig(tp=2, pp=3), 8, 1),
        (LayoutConfig(tp=2, pp=3, ep=2), 8, 2),
        (LayoutConfig(tp=3), 8, 1),
        (LayoutConfig(ep=3), 8, 1),
        (LayoutConfig(ep=8), 8, 0),
        (LayoutConfig(tp=16), 8, 1),
    ],
)
def test_sizes_make_up_the_world(config, world, count):
    assert len(divides(config, world)) == count


def test_the_product_that_does_not_divide_is_named():
    (problem,) = divides(LayoutConfig(tp=3), 8)
    assert "3 x 1 x 1 = 3 does not divide the 8 processes" in problem.problem
    assert "1, 2, 4 or 8" in problem.hint
