"""Where a machine stands in a job: from flags, and from what schedulers say."""

from __future__ import annotations

import pytest

from msllm.config import LaunchConfig
from msllm.engine.placement import first_host, placement, scheduled
from msllm.errors import InputError

TWO = LaunchConfig(nodes=4)


@pytest.mark.parametrize(
    ("environ", "rank", "endpoint"),
    [
        (
            {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "m",
             "PET_MASTER_PORT": "5"},
            3,
            "m:5",
        ),
        ({"PET_NNODES": "2:4", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "m:7"}, 1, "m:7"),
        ({"PET_NODE_RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "9"}, 1, "m:9"),
        ({"MASTER_ADDR": "m", "NODE_RANK": "2", "NNODES": "4"}, 2, "m:29400"),
        ({"MASTER_ADDR": "m", "MASTER_PORT": "1", "WORLD_SIZE": "4", "RANK": "2"}, 2, "m:1"),
        ({"MASTER_ADDR": "m", "JOB_COMPLETION_INDEX": "1"}, 1, "m:29400"),
        (
            {"SLURM_NNODES": "4", "SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "n[07-09,12]",
             "SLURM_JOB_ID": "123456"},
            2,
            "n07:23456",
        ),
    ],
)  # fmt: skip
def test_schedulers(environ, rank, endpoint):
    place = placement(environ, TWO)
    assert (place.nodes, place.node_rank, place.endpoint) == (4, rank, endpoint)
    assert place.source not in ("", "given")


def test_flags_win_over_the_scheduler():
    environ = {"SLURM_NNODES": "4", "SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "n[1-4]"}
    config = LaunchConfig(nodes=4, node_rank=1, rdzv_endpoint="h:1")
    place = placement(environ, config)
    assert (place.node_rank, place.endpoint, place.source) == (1, "h:1", "given")
    place = placement(environ, LaunchConfig(nodes=4, node_rank=1))
    assert (place.node_rank, place.endpoint) == (1, "n1:20000")


def test_one_machine_needs_no_scheduler():
    assert placement({"SLURM_NODEID": "3", "MASTER_ADDR": "m"}, LaunchConfig()).node_rank == 0


def test_how_many_machines_a_scheduler_gives():
    found = scheduled({"SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"})
    assert found is not None
    assert found.nodes == 2
    assert scheduled({"HOME": "/"}) is None
    # inside a worker of torchrun's these describe the worker, not a machine
    assert scheduled({"MASTER_ADDR": "m", "RANK": "1", "LOCAL_RANK": "1"}) is None


def test_all_that_is_missing_is_named_at_once():
    with pytest.raises(InputError) as caught:
        placement({}, TWO)
    assert [p.hint for p in caught.value.problems] == [
        "give --node-rank 0 to 3, or start it with srun or a Kubernetes job",
        "give --rdzv-endpoint HOST:PORT of machine 0, the same on each",
    ]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (LaunchConfig(nodes=2, node_rank=2, rdzv_endpoint="h:1"), "machine number 2 of 2"),
        (LaunchConfig(nodes=2, node_rank=0, rdzv_endpoint="h:x"), "'h:x' is not HOST:PORT"),
        (LaunchConfig(nodes=2, node_rank=0, rdzv_endpoint="tcp://h:1"), "is not HOST:PORT"),
    ],
)
def test_places_that_make_no_sense(config, text):
    with pytest.raises(InputError, match=text):
        placement({}, config)


def test_an_endpoint_without_a_port_gets_one():
    config = LaunchConfig(nodes=2, node_rank=0, rdzv_endpoint="[fe80::1]")
    assert placement({}, config).endpoint == "[fe80::1]:29400"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4]", "n1"),
        ("node[007-009,12],gpu3", "node007"),
        ("a-b[3,5]-x,c", "a-b3-x"),
    ],
)
def test_slurms_short_form_of_hosts(nodelist, host):
    assert first_host(nodelist) == host
