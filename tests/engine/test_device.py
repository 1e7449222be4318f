"""The device layer on the CPU for real, and on pretended NPUs and GPUs for what it asks of them."""

import copy
import logging
import os
import pickle
import random
import subprocess
import sys
import time
from types import ModuleType

import numpy as np
import pytest
import torch

from msllm.engine import device as devices
from msllm.engine.device import Device, device_count, probe, published_peak_flops, select_device
from msllm.errors import InputError

CPU = Device("cpu")
LOADER_ERROR = "libhccl.so: cannot open shared object file: No such file or directory"


class FakeRuntime(ModuleType):
    """What torch.npu and torch.cuda offer, remembering how it was called."""

    def __init__(self, count: int = 2, name: str = "Ascend910B2"):
        super().__init__("fake")
        self.count, self.name, self.calls = count, name, []

    def device_count(self):
        return self.count

    def get_device_name(self, index):
        return self.name

    def mem_get_info(self, index):
        return 40, 64

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args):
            self.calls.append((name, *args))
            return {"memory_allocated": 11, "max_memory_allocated": 22}.get(name)

        return call


@pytest.fixture
def npu(monkeypatch):
    """A machine with two NPUs."""
    runtime = FakeRuntime()
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", runtime, raising=False)
    return runtime


@pytest.fixture
def broken_torch_npu(monkeypatch, tmp_path):
    """torch_npu as it is where CANN's libraries are missing; each attempt leaves a line."""
    write_broken_torch_npu(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "attempts"


def write_broken_torch_npu(folder):
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(
        "from pathlib import Path\n"
        "with (Path(__file__).parent.parent / 'attempts').open('a') as attempts:\n"
        "    attempts.write('tried\\n')\n"
        f"raise ImportError({LOADER_ERROR!r})\n"
    )


@pytest.fixture
def cuda_build(monkeypatch):
    monkeypatch.setattr(devices, "_torch_version", lambda: "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)


# Choosing


def test_auto_takes_the_npu_first(npu):
    assert select_device("auto", 1) == Device("npu", 1)


@pytest.mark.usefixtures("cuda_build")
def test_auto_takes_the_gpu_before_the_cpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert select_device() == Device("cuda", 0)


def test_auto_falls_back_to_the_cpu(no_accelerator):
    assert select_device(index=3) == Device("cpu", 3)


def test_auto_says_why_an_installed_npu_is_passed_over(broken_torch_npu, no_accelerator, caplog):
    with caplog.at_level(logging.WARNING):
        assert select_device().kind == "cpu"
    assert LOADER_ERROR in caplog.text


def test_the_cpu_never_touches_torch_npu(broken_torch_npu):
    select_device("cpu")
    device_count("cpu")
    assert probe("cpu") is None
    CPU.seed(1)
    CPU.synchronize()
    assert not broken_torch_npu.exists()


def refusal(*args):
    with pytest.raises(InputError) as caught:
        select_device(*args)
    assert caught.value.exit_status == 2
    (problem,) = caught.value.problems
    return problem


def test_npu_without_torch_npu():
    problem = refusal("npu")
    assert problem.problem == "torch_npu is not installed"
    assert problem.where == "--device npu"
    assert torch.__version__.split("+")[0] in problem.hint


def test_npu_without_cann_quotes_the_loader(broken_torch_npu):
    problem = refusal("npu")
    assert "does not load" in problem.problem
    assert LOADER_ERROR in problem.problem
    assert "set_env.sh" in problem.hint
    assert broken_torch_npu.exists()


def test_npu_of_another_version_is_not_blamed_on_cann(broken_torch_npu):
    init = broken_torch_npu.parent / "torch_npu" / "__init__.py"
    init.write_text("raise RuntimeError('undefined symbol: _ZN3c10')")
    problem = refusal("npu")
    assert "undefined symbol" in problem.problem
    assert "versions that go together" in problem.hint


def test_npu_without_a_visible_device(npu):
    npu.count = 0
    problem = refusal("npu")
    assert "no NPU is visible" in problem.problem
    assert "ASCEND_RT_VISIBLE_DEVICES" in problem.hint
    assert device_count("npu") == 0


def test_index_beyond_the_visible_devices(npu):
    assert device_count("npu") == 2
    assert select_device("npu", 1).index == 1
    for kind in ("npu", "auto"):
        problem = refusal(kind, 2)
        assert "npu:2" in problem.problem
        assert "2 are visible" in problem.problem
        assert problem.where == f"--device {kind}"


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0"])
def test_cuda_without_cuda(no_accelerator, monkeypatch, version):
    monkeypatch.setattr(devices, "_torch_version", lambda: version)
    assert "built without CUDA" in refusal("cuda").problem


@pytest.mark.usefixtures("cuda_build")
def test_cuda_without_a_visible_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "no CUDA device is visible" in refusal("cuda").problem


def test_unknown_kind():
    problem = refusal("tpu")
    assert "'tpu'" in problem.problem
    assert "npu" in problem.hint


def test_a_broken_npu_package_does_not_stop_msllm_on_the_cpu(tmp_path):
    """As installed, torch_npu has torch load it: `import torch` alone fails then."""
    write_broken_torch_npu(tmp_path)
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:autoload\n")
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def python(code):
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )

    assert python("import torch").returncode != 0
    ours = python("from msllm.engine.device import select_device; print(select_device('cpu').name)")
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.strip() == CPU.name


# What differs between the kinds


@pytest.mark.parametrize(
    ("device", "torch_device", "backend"),
    [
        (Device("npu", 3), "npu:3", "hccl"),
        (Device("cuda", 1), "cuda:1", "nccl"),
        (Device("cpu", 5), "cpu", "gloo"),
    ],
)
def test_torch_device_and_process_group_backend(device, torch_device, backend, npu):
    if device.kind == "npu":
        with pytest.raises(RuntimeError, match="npu"):  # the pretended torch_npu registers nothing
            _ = device.torch_device
    else:
        assert device.torch_device == torch.device(torch_device)
    assert device.process_group_backend == backend


def test_an_accelerator_is_asked_for_its_own_index(npu):
    device = Device("npu", 1)
    device.set_current()
    device.synchronize()
    device.reset_peak_memory()
    device.rng_state()
    device.set_rng_state(torch.zeros(1))
    assert (device.memory_allocated(), device.peak_memory()) == (11, 22)
    assert (device.free_memory(), device.total_memory()) == (40, 64)
    assert [(call[0], call[-1]) for call in npu.calls] == [
        ("set_device", 1),
        ("synchronize", 1),
        ("reset_peak_memory_stats", 1),
        ("get_rng_state", 1),
        ("set_rng_state", 1),
        ("memory_allocated", 1),
        ("max_memory_allocated", 1),
    ]


def test_seed_covers_python_numpy_torch_and_the_device(npu):
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    for device in (CPU, Device("npu")):
        device.seed(2**40 + 5)
        first = draw()
        device.seed(2**40 + 5)
        assert draw() == first
        assert draw() != first
    assert ("manual_seed", 2**40 + 5) in npu.calls


def test_rng_state_goes_back():
    state = CPU.rng_state()
    first = torch.rand(5)
    CPU.set_rng_state(state)
    assert torch.equal(torch.rand(5), first)


def test_dtypes(monkeypatch):
    assert CPU.supports("bf16")
    assert CPU.supports("fp32")
    assert not CPU.supports("fp8")
    assert Device("npu").supports("bf16")
    assert not Device("npu").supports("fp64")
    for major, answer in ((7, False), (9, True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=major: (major, 0))
        assert Device("cuda").supports("bf16") is answer


def test_is_data():
    device = Device("npu", 2)
    assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == device
    assert len({device, Device("npu", 2), Device("npu", 1)}) == 2


def test_environment_explains_itself_and_is_empty_on_the_cpu():
    assert CPU.environment() == {}
    environment = Device("npu").environment()
    assert {"PYTORCH_NPU_ALLOC_CONF", "TASK_QUEUE_ENABLE", "HCCL_CONNECT_TIMEOUT"} <= set(
        environment
    )
    for value, why in environment.values():
        assert value
        assert len(why.split()) > 3


# Memory


def test_memory_of_the_process_follows_a_tensor():
    size = 96 * 2**20
    before = CPU.memory_allocated()
    CPU.reset_peak_memory()
    tensor = torch.ones(size // 4)
    assert CPU.memory_allocated() > before + 0.9 * size
    del tensor
    assert CPU.peak_memory() > before + 0.9 * size
    if sys.platform == "linux":
        CPU.reset_peak_memory()
        assert CPU.peak_memory() < before + 0.5 * size


def test_memory_of_the_machine():
    assert 0 < CPU.free_memory() < CPU.total_memory()
    assert CPU.memory_allocated() < CPU.total_memory()


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_recognizes_that_memory_ran_out(error, answer):
    assert CPU.is_out_of_memory(error) is answer


def test_recognizes_torchs_own_cpu_allocator():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert CPU.is_out_of_memory(caught.value)


# Speed


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("Ascend910B1", 414e12),
        ("Ascend910B2C", 354e12),
        ("Ascend910B2", 376e12),
        ("Ascend910B3", 313e12),
        ("Ascend910B4-1", 280e12),
        ("Ascend910_9382", 376e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
    ],
)
def test_peak_of_known_devices(npu, name, bf16):
    npu.name = name
    device = Device("npu")
    assert device.peak_flops(torch.bfloat16) == device.peak_flops(torch.float16) == bf16
    assert device.peak_flops(torch.float32) < bf16 / 3


def test_peak_of_the_cpu_is_one_that_a_product_reaches():
    peak = CPU.peak_flops(torch.float32)
    a = torch.randn(768, 768)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    seen = 2 * 768**3 / min(times)
    assert seen / 10 < peak < seen * 10  # other processes may have had the cores meanwhile


def test_peak_of_an_unknown_accelerator_is_not_invented():
    assert published_peak_flops("Ascend999", torch.bfloat16) is None
