"""Where this machine stands among the machines of a job, from flags or the scheduler's environment.

Pure functions of the environment; what is done with the answer is `launch`'s business. Slurm,
torchrun's and Kubeflow's variables (PET_*, MASTER_ADDR), and indexed Kubernetes jobs are known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from msllm.config import LaunchConfig
from msllm.errors import InputError, Problem

DEFAULT_PORT = 29400


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What a scheduler says. None where it says nothing.

    `source` names the variables, for people.
    """

    nodes: int | None
    node_rank: int | None
    endpoint: str | None
    source: str


@dataclass(frozen=True, slots=True)
class Placement:
    """This machine's place in the job.

    Attributes:
        nodes: Machines in all.
        node_rank: This machine's number, from 0.
        endpoint: HOST:PORT of the first machine; empty for a job on one machine.
        source: Where rank and endpoint come from.
    """

    nodes: int
    node_rank: int
    endpoint: str
    source: str


def placement(environ: Mapping[str, str], config: LaunchConfig) -> Placement:
    """Place this machine: flags and settings first, then the scheduler's environment.

    Raises:
        InputError: For several machines, if the rank or the endpoint is known from nowhere, or a
            value makes no sense.
    """
    if config.nodes == 1:
        return Placement(1, 0, "", "one machine")
    found = scheduled(environ)
    rank, endpoint = config.node_rank, config.rdzv_endpoint
    source = "given"
    if found is not None and (rank is None or endpoint is None):
        source = found.source
        rank = found.node_rank if rank is None else rank
        endpoint = found.endpoint if endpoint is None else endpoint
    problems = _missing(config.nodes, rank, endpoint)
    if problems:
        raise InputError(problems)
    assert rank is not None
    assert endpoint is not None
    return Placement(config.nodes, rank, _with_port(endpoint), source)


def scheduled(environ: Mapping[str, str]) -> Scheduled | None:
    """Read what the scheduler says of this machine, if there is one."""
    for read in (_torchrun, _kubernetes, _slurm):
        found = read(environ)
        if found is not None:
            return found
    return None


def first_host(nodelist: str) -> str:
    """Find the first host of Slurm's short form: `node[07-09,12],gpu1` begins with node07."""
    head = re.match(
        r"(?P<name>[^,\[]+)(?:\[(?P<first>[^,\-\]]+)[^\]]*\](?P<tail>[^,\[]*))?", nodelist
    )
    if head is None:
        return nodelist
    return head["name"] + (head["first"] or "") + (head["tail"] or "")


def _torchrun(environ: Mapping[str, str]) -> Scheduled | None:
    """Read torchrun's own variables; Kubeflow's training operator sets them in every pod."""
    if "PET_NODE_RANK" not in environ and "PET_NNODES" not in environ:
        return None
    endpoint = environ.get("PET_RDZV_ENDPOINT") or _address(environ, "PET_MASTER")
    return Scheduled(
        _integer(environ, "PET_NNODES"),
        _integer(environ, "PET_NODE_RANK"),
        endpoint or _address(environ, "MASTER"),
        "PET_NNODES, PET_NODE_RANK",
    )


def _kubernetes(environ: Mapping[str, str]) -> Scheduled | None:
    """MASTER_ADDR with a rank a pod; the older Kubeflow operator's WORLD_SIZE counts pods."""
    if "MASTER_ADDR" not in environ or "LOCAL_RANK" in environ:
        return None
    for rank in ("NODE_RANK", "GROUP_RANK", "JOB_COMPLETION_INDEX", "RANK"):
        if rank in environ:
            counts = ("NNODES", "WORLD_SIZE") if rank == "RANK" else ("NNODES", "GROUP_WORLD_SIZE")
            count = next((name for name in counts if name in environ), None)
            return Scheduled(
                _integer(environ, count) if count else None,
                _integer(environ, rank),
                _address(environ, "MASTER"),
                f"MASTER_ADDR, {rank}",
            )
    return None


def _slurm(environ: Mapping[str, str]) -> Scheduled | None:
    if "SLURM_NODEID" not in environ:
        return None
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    endpoint = None
    if nodelist:
        # jobs that share a machine must not share a port
        port = 20000 + (_integer(environ, "SLURM_JOB_ID") or 0) % 10000
        endpoint = f"{first_host(nodelist)}:{port}"
    nodes = _integer(environ, "SLURM_STEP_NUM_NODES") or _integer(environ, "SLURM_NNODES")
    return Scheduled(
        nodes,
        _integer(environ, "SLURM_NODEID"),
        endpoint,
        "Slurm: SLURM_NNODES, SLURM_NODEID, SLURM_JOB_NODELIST",
    )


def _address(environ: Mapping[str, str], prefix: str) -> str | None:
    host = environ.get(f"{prefix}_ADDR")
    port = environ.get(f"{prefix}_PORT")
    return f"{host}:{port or DEFAULT_PORT}" if host else None


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    """Read a whole number; `2:4` (torchrun's elastic range) counts as its upper end."""
    text = environ.get(name, "").split(":")[-1].strip()
    return int(text) if text.isdigit() else None


def _missing(nodes: int, rank: int | None, endpoint: str | None) -> list[Problem]:
    problems = []
    if rank is None:
        problems.append(
            Problem(
                f"{nodes} machines, but nothing says which of them this is",
                "--nodes",
                f"give --node-rank 0 to {nodes - 1}, or start it with srun or a Kubernetes job",
            )
        )
    elif rank >= nodes:
        problems.append(
            Problem(
                f"machine number {rank} of {nodes}",
                f"--node-rank {rank}",
                f"numbers go from 0 to {nodes - 1}",
            )
        )
    if endpoint is None:
        problems.append(
            Problem(
                f"{nodes} machines, but nothing says where the first one is",
                "--nodes",
                "give --rdzv-endpoint HOST:PORT of machine 0, the same on each",
            )
        )
    elif not _is_endpoint(endpoint):
        problems.append(
            Problem(
                f"{endpoint!r} is not HOST:PORT",
                "--rdzv-endpoint",
                f"such as node01:{DEFAULT_PORT}",
            )
        )
    return problems


def _is_endpoint(text: str) -> bool:
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+)(:(?P<port>\d{1,5}))?", text)
    return match is not None and 0 < int(match["port"] or DEFAULT_PORT) < 2**16


def _with_port(endpoint: str) -> str:
    return endpoint if re.search(r":\d+$", endpoint) else f"{endpoint}:{DEFAULT_PORT}"
