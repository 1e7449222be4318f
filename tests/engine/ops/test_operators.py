"""The set of operators: chosen once, copied and pickled with a layer's config."""

import copy
import dataclasses
import inspect
import pickle

import pytest

from msllm.engine.ops import REFERENCE, operators_for

KINDS = ["npu", "cuda", "cpu"]


@pytest.mark.parametrize("kind", KINDS)
def test_survives_copy_and_pickle(kind):
    ops = operators_for(kind)
    assert copy.deepcopy(ops) == ops
    assert pickle.loads(pickle.dumps(ops)) == ops


@pytest.mark.parametrize("kind", KINDS)
def test_every_implementation_has_the_signature_of_its_reference(kind):
    ops = operators_for(kind)
    for field in dataclasses.fields(ops):
        chosen, reference = getattr(ops, field.name), getattr(REFERENCE, field.name)
        assert str(inspect.signature(chosen)) == str(inspect.signature(reference)), field.name


def test_cpu_and_cuda_compute_with_the_references():
    assert operators_for("cpu") == operators_for("cuda") == REFERENCE


def test_implementations_are_named_for_the_run_header():
    names = operators_for("npu").implementations()
    assert set(names) == {field.name for field in dataclasses.fields(REFERENCE)}
    assert names["attention"] == "attention_npu.attention_npu (reference for a soft cap)"
    assert names["rms_norm"] == "norm.rms_norm_npu"
    assert names["layer_norm"] == "norm.layer_norm"
    assert REFERENCE.implementations()["attention"] == "attention.attention"


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        REFERENCE.attention = None  # type: ignore[misc]
