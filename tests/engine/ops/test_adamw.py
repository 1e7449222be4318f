"""AdamW against the paper's formula in float64, and as Megatron-core expects it."""

import copy

import pytest
import torch

from msllm.engine.ops.adamw import (
    adamw,
    adamw_foreach,
    adamw_npu,
    foreach_adamw,
    fuse_adamw,
    fuse_adamw_npu,
)

SETTINGS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def formula(start, gradients):
    """Algorithm 2 of arXiv:1711.05101, with the decay scaled by the learning rate as torch does."""
    p = start.double()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    beta1, beta2 = SETTINGS["betas"]
    for t, g in enumerate(gradients, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        step = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + SETTINGS["eps"])
        p = p - SETTINGS["lr"] * (step + SETTINGS["weight_decay"] * p)
    return p


def train(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("make", [adamw, adamw_foreach, adamw_npu])
def test_equals_the_formula(make):
    start, gradients = torch.randn(7, 5), torch.randn(6, 7, 5)
    parameter = torch.nn.Parameter(start.clone())
    train(make([parameter], **SETTINGS), parameter, gradients)
    expected = formula(start, gradients.double())
    torch.testing.assert_close(parameter.detach(), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [adamw, adamw_foreach])
def test_state_is_what_megatrons_distributed_optimizer_reads(make):
    parameter = torch.nn.Parameter(torch.randn(3))
    optimizer = make([{"params": [parameter], "weight_decay": 0.0}], **SETTINGS)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    train(optimizer, parameter, torch.randn(2, 3))
    state = optimizer.state[parameter]
    assert set(state) == {"exp_avg", "exp_avg_sq", "step"}
    assert state["step"].item() == 2
    assert state["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("switch", [fuse_adamw, foreach_adamw, fuse_adamw_npu])
def test_switching_somebody_elses_optimizer_goes_on_with_the_same_curve(switch):
    """Also after a state was loaded that brings other settings."""
    start, gradients = torch.randn(7, 5), torch.randn(6, 7, 5)
    first = torch.nn.Parameter(start.clone())
    plain = torch.optim.AdamW([first], foreach=False, **SETTINGS)
    train(plain, first, gradients[:3])

    second = torch.nn.Parameter(first.detach().clone())
    other = torch.optim.AdamW([second], **SETTINGS)
    other.load_state_dict(copy.deepcopy(plain.state_dict()))
    switch(other)
    train(other, second, gradients[3:])
    expected = formula(start, gradients.double())
    torch.testing.assert_close(second.detach(), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "kernel"),
    [(adamw, "aten::_fused_adamw_"), (adamw_foreach, "aten::_foreach_addcdiv_")],
)
def test_the_chosen_kernel_runs(make, kernel):
    parameter = torch.nn.Parameter(torch.randn(3))
    optimizer = make([parameter], **SETTINGS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(optimizer, parameter, torch.randn(1, 3))
    assert kernel in {event.key for event in profile.key_averages()}


def test_an_npu_without_a_fused_kernel_updates_all_at_once():
    optimizer = adamw_npu([torch.nn.Parameter(torch.randn(3))], **SETTINGS)
    assert [(g["fused"], g["foreach"]) for g in optimizer.param_groups] == [(False, True)]


def test_a_count_of_steps_that_is_a_number_becomes_the_kernels_tensor():
    """Megatron's checkpoints may bring a plain number."""
    parameter = torch.nn.Parameter(torch.randn(3))
    optimizer = adamw_foreach([parameter], **SETTINGS)
    train(optimizer, parameter, torch.randn(2, 3))
    optimizer.state[parameter]["step"] = 2
    fuse_adamw(optimizer)
    train(optimizer, parameter, torch.randn(1, 3))
    assert optimizer.state[parameter]["step"].item() == 3
