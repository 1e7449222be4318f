"""The time model against sums done by hand."""

from __future__ import annotations

import pytest

from msllm.engine.layout import Layout
from msllm.engine.planning import schedule, timing
from msllm.engine.planning.records import ChunkTrace, Record
from msllm.engine.planning.timing import Group, collective_seconds, groups
from msllm.models.device_models import DeviceModel, Efficiency

DEVICE = DeviceModel(
    "d", "npu", bf16=100e12, fp32=25e12, memory_gib=64, memory_bandwidth=1e12, node=8,
    node_bandwidth=100e9, network_bandwidth=10e9, latency=0.0,
    efficiency=Efficiency(matmul=0.5, attention=0.25, memory=0.5, links=0.5),
)  # fmt: skip
GB = 10**9


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (("matmul", 50 * 10**12, 0), 1.0),
        (("attention", 25 * 10**12, 0), 1.0),
        (("matmul", 10**9, 500 * GB), 1.0),  # bound by its bytes
        (("memory", 0, 250 * GB), 0.5),
    ],
)
def test_an_operation_takes_as_long_as_its_flops_or_its_bytes(work, seconds):
    assert timing.work_seconds({work: 2}, DEVICE, "bf16") == pytest.approx(2 * seconds)


@pytest.mark.parametrize(
    ("name", "group", "seconds"),
    [
        # 50 GB/s in a machine: seven eighths of the message pass each link
        ("all-gather", Group(8, 1), 8 * 7 / 8 / 50),
        ("reduce-scatter", Group(8, 1), 8 * 7 / 8 / 50),
        ("all-reduce", Group(8, 1), 2 * 8 * 7 / 8 / 50),
        # two machines, four ranks of each: the network carries a quarter, half of it out
        ("all-gather", Group(8, 2), 8 * 3 / 4 / 50 + 8 / 4 / 2 / 5),
        # one rank a machine
        ("all-gather", Group(4, 8), 8 * 3 / 4 / 5),
        # half of the rows leave the machine
        ("all-to-all", Group(16, 1), 8 * 8 / 16 / 5),
        ("all-to-all", Group(4, 1), 8 * 3 / 4 / 50),
        ("send", Group(2, 8), 8 / 5),
        ("send", Group(2, 4), 8 / 50),
        ("all-gather", Group(1, 1), 0.0),
    ],
)
def test_a_collective_takes_as_long_as_its_slowest_links(name, group, seconds):
    assert collective_seconds(name, 8 * GB, group, DEVICE, 8) == pytest.approx(seconds)


def test_groups_are_as_far_apart_as_their_ranks():
    layout = Layout(tp=2, pp=2, dp=4, ep=4, sequence_parallel=True)
    known = groups(layout)
    for name, members in {
        "tp": [0, 1], "dp": [0, 2, 4, 6], "pp": [0, 8], "ep": [0, 1, 2, 3],
        "expert dp": [0, 4], "embedding": [0, 8],
    }.items():  # fmt: skip
        assert known[name] == Group(len(members), members[1] - members[0]), name


def test_a_pipeline_fills_and_drains():
    # four stages of 3 s, 6 micro-batches: (6 + 3) x 3 s, of which three rounds are the bubble
    seconds, bubble = schedule.step_seconds([3.0] * 4, 6, 1, 0.0)
    assert seconds == pytest.approx(27)
    assert bubble == pytest.approx(9 / 27)
    interleaved, _ = schedule.step_seconds([3.0] * 4, 6, 3, 0.0)
    assert interleaved == pytest.approx(18 + 3)


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_holds_a_micro_batch_for_each_stage_behind_it(stage):
    layout = Layout(pp=4)
    chunk = ChunkTrace(Record(start=0, end=10, peak=11), Record(peak=13))
    kept, most = schedule.most_held([chunk], layout, stage, 8)
    assert (kept, most) == (10 * (4 - stage), 10 * (3 - stage) + 13)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_each_pass_comes_once_and_forward_first(stage, vpp):
    done: list[tuple[bool, int]] = list(schedule.turns(Layout(pp=4, vpp=vpp), stage, 8))
    assert len(done) == 2 * 8 * vpp
    for chunk in range(vpp):
        held = 0
        for forward, index in done:
            if index == chunk:
                held += 1 if forward else -1
            assert held >= 0
        assert held == 0
