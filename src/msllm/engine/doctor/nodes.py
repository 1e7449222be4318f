"""Whether the other nodes of a job can be reached over TCP, as their rendezvous and HCCL need.

Only the hosts' network is tried. HCCL moves tensors over the devices' own ports, whose addresses
`hccn_tool -i N -ip -g` shows and which only it can try (`hccn_tool -i N -ping -g address IP`).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from msllm.engine.doctor.finding import Finding, Verdict

PORT = 29500
"""Where torch's rendezvous listens if nobody says otherwise."""
PATIENCE = 5.0
"""Seconds that a host has to answer."""


def findings(hosts: Sequence[str], patience: float = PATIENCE) -> Iterator[Finding]:
    """Try all hosts, `HOST` or `HOST:PORT`, at once."""
    with ThreadPoolExecutor(max_workers=64) as pool:
        yield from pool.map(lambda host: _node(host, patience), hosts)


def _node(host: str, patience: float) -> Finding:
    name, _, port = host.partition(":")
    about = f"node {host}"
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        return Finding(about, Verdict.FAULT, f"{port!r} is no port", "write HOST or HOST:PORT")
    number = int(port) if port else PORT
    try:
        with socket.create_connection((name, number), timeout=patience):
            return Finding(about, Verdict.OK, f"port {number} is open")
    except socket.gaierror:
        mend = "use its address, or add it to /etc/hosts on every node"
        return Finding(about, Verdict.FAULT, "its name is not known", mend)
    except ConnectionRefusedError:  # the host has answered: nobody listens yet
        return Finding(about, Verdict.OK, f"it answers; nothing listens at port {number} yet")
    except OSError as error:
        mend = f"is a firewall between, or the machine down? Open port {number} and those of HCCL"
        return Finding(about, Verdict.FAULT, f"no answer: {error.strerror or error}", mend)
