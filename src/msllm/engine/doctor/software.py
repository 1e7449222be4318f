"""Versions of Python, packages and CANN, and whether they go together.

torch_npu X.Y is built for torch X.Y exactly (its README). The pairs of CANN and torch are those
that the releases of torch_npu document.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement

from msllm.engine.doctor.finding import Finding, Verdict

CANN_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
CANN_DEFAULT = Path("/usr/local/Ascend/ascend-toolkit/latest")
DRIVER = Path("/usr/local/Ascend/driver/version.info")
CANN_TORCH = {"9.0": ("2.7", "2.10"), "8.5": ("2.6", "2.9")}
"""CANN -> first and last torch of its documented pairs."""


def findings(env: Mapping[str, str], driver: Path = DRIVER) -> Iterator[Finding]:
    """Judge the software."""
    yield Finding("python", Verdict.OK, f"{platform.python_version()} on {platform.machine()}")
    yield from _requirements()
    torch, npu = version("torch"), version("torch_npu")
    if torch is not None:
        yield Finding("torch", Verdict.OK, torch)
    yield _torch_npu(torch, npu)
    home = cann_home(env)
    if npu is None and home is None:
        yield Finding("CANN", Verdict.NOTE, "not installed: no NPU can be used from here")
        return
    yield _cann(home, torch)
    yield _driver(driver)


def version(package: str) -> str | None:
    """A package's version; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> Iterator[Finding]:
    """Hold what is installed against what msllm's package asks for."""
    wrong = 0
    for text in importlib.metadata.requires("msllm") or ():
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        found = version(needed.name)
        if found is not None and needed.specifier.contains(found, prereleases=True):
            continue
        wrong += 1
        said = "not installed" if found is None else found
        mend = f"pip install '{needed.name}{needed.specifier}'"
        yield Finding(needed.name, Verdict.FAULT, said, mend)
    if not wrong:
        yield Finding("packages", Verdict.OK, f"all that msllm {version('msllm')} needs")


def _torch_npu(torch: str | None, npu: str | None) -> Finding:
    wanted = "X.Y" if torch is None else minor(torch)
    if npu is None:
        mend = f"on an Ascend machine: pip install 'torch_npu=={wanted}.*'"
        return Finding("torch_npu", Verdict.NOTE, "not installed", mend)
    if torch is None or minor(npu) != minor(torch):
        mend = f"pip install 'torch_npu=={wanted}.*': both must be of one release"
        return Finding("torch_npu", Verdict.FAULT, f"{npu} beside torch {torch}", mend)
    return Finding("torch_npu", Verdict.OK, npu)


def minor(version: str) -> str:
    """2.13.0+cpu -> 2.13."""
    return ".".join(version.split("+")[0].split(".")[:2])


def cann_home(env: Mapping[str, str]) -> Path | None:
    """Where CANN is, by its own variables or at its usual place."""
    for name in CANN_HOMES:
        if env.get(name):
            return Path(env[name])
    return CANN_DEFAULT if CANN_DEFAULT.exists() else None


def _cann(home: Path | None, torch: str | None) -> Finding:
    if home is None:
        mend = "install CANN, then `source /usr/local/Ascend/ascend-toolkit/set_env.sh`"
        return Finding("CANN", Verdict.FAULT, "not found", mend)
    found = _written_version(home, ("version.cfg", "ascend_toolkit_install.info", "version.info"))
    if found is None:
        mend = "is its variable right? `source .../set_env.sh` sets it"
        return Finding("CANN", Verdict.WARNING, f"no version is told in {home}", mend)
    pair = CANN_TORCH.get(minor(found))
    if pair is None or torch is None:
        return Finding("CANN", Verdict.NOTE, f"{found}: no documented pair with torch {torch}")
    number = _numbers(minor(torch))
    if not _numbers(pair[0]) <= number <= _numbers(pair[1]):
        said = f"{found}: documented with torch {pair[0]} to {pair[1]}, here is {torch}"
        return Finding("CANN", Verdict.WARNING, said, "install a pair that its maker documents")
    return Finding("CANN", Verdict.OK, found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _driver(path: Path) -> Finding:
    found = _written_version(path.parent, (path.name,))
    if found is None:
        mend = "in a container, mount the host's driver; else install it"
        return Finding("driver", Verdict.FAULT, f"none at {path.parent}", mend)
    return Finding("driver", Verdict.OK, found)


def _written_version(folder: Path, names: tuple[str, ...]) -> str | None:
    """The first `version=1.2.3` of files like that of CANN or its driver."""
    for path in [p for name in names for p in (folder / name, *folder.glob(f"*/{name}"))]:
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        found = re.search(r"version[^=\n]*=\s*\[?(?:\d+:)?([0-9][0-9.A-Za-z]*)", text, re.I)
        if found is not None:
            return found[1]
    return None
