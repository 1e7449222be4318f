"""The real torch_npu beside the installed torch, on pretended devices, for subprocesses only.

It is fetched once into a folder of its own, with the stand-ins of `stand_ins` built for it. The
default environment never sees either: where torch_npu lies without its libraries, even
`import torch` fails, for torch loads it by itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.npu import stand_ins

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "npu"
DEVICES = 8


class Unavailable(Exception):
    """Why there can be no torch_npu here."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A torch_npu that loads: `site` holds the package, `libraries` its stand-ins."""

    site: Path
    libraries: Path

    def variables(self, devices: int = DEVICES) -> dict[str, str]:
        """What to add to a subprocess's environment to have `devices` pretended NPUs."""
        paths = [str(ROOT), str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(paths),
            "LD_LIBRARY_PATH": str(self.libraries),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # msllm loads it when it is asked for
            "NPU_STUB_DEVICES": str(devices),
            "TASK_QUEUE_ENABLE": "0",
            "OMP_NUM_THREADS": "1",
        }


def prepare() -> Environment:
    """Make the environment, or find it made.

    Raises:
        Unavailable: There can be none here: offline, a GPU, a real torch_npu, no compiler.
    """
    torch_version = importlib.metadata.version("torch").split("+")[0]
    _refuse_other_hardware()
    folder = CACHE / f"{torch_version}-py{sys.version_info.major}{sys.version_info.minor}"
    with _locked(folder):
        site = folder / "site"
        if not (folder / "fetched").exists():
            _fetch(site, torch_version)
            (folder / "fetched").touch()
        libraries = folder / f"libraries-{_recipe()}"
        if not libraries.exists():
            _build(libraries, site)
    return Environment(site, libraries)


def _refuse_other_hardware() -> None:
    import torch

    if importlib.util.find_spec("torch_npu") is not None or os.environ.get("ASCEND_HOME_PATH"):
        raise Unavailable("an own torch_npu or CANN is installed, beside which none is pretended")
    if torch.cuda.is_available():
        raise Unavailable("a GPU is visible, beside which torch_npu does not load")
    missing = [tool for tool in stand_ins.TOOLS if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{', '.join(missing)} is needed to build the stand-ins for CANN")


def _fetch(site: Path, torch_version: str) -> None:
    """Install the torch_npu of exactly this torch (a post release counts), and nothing else."""
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(site)]
    done = subprocess.run(
        [*command, f"torch-npu=={torch_version}.*"], capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or [done.stderr]
        raise Unavailable(f"torch_npu for torch {torch_version} can't be installed: {errors[-1]}")


def _recipe() -> str:
    texts = (stand_ins.RUNTIME.read_bytes(), Path(stand_ins.__file__).read_bytes())
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def _build(libraries: Path, site: Path) -> None:
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    part = libraries.with_name("part")
    shutil.rmtree(part, ignore_errors=True)
    stand_ins.build(part, site / "torch_npu", Path(torch.origin).parent)
    part.rename(libraries)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One test process at a time: the others find what it made."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
