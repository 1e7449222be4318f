"""Figures of the machine's memory, with cgroup limits of both versions laid out in a folder."""

import psutil
import pytest

from msllm.engine import host_memory


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """An empty cgroup tree in place of the machine's."""
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    return tmp_path


def test_without_limits_the_machine_counts(cgroup):
    assert host_memory.total() == psutil.virtual_memory().total
    assert host_memory.available() <= psutil.virtual_memory().total


def test_limit_of_version_2_without_droppable_cache(cgroup):
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("700000\n")
    (cgroup / "memory.stat").write_text("anon 1\ninactive_file 200000\nactive_file 3\n")
    assert host_memory.total() == 1000000
    assert host_memory.available() == 500000


def test_limit_of_version_1(cgroup):
    folder = cgroup / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("2000000\n")
    (folder / "memory.usage_in_bytes").write_text("500000\n")
    assert host_memory.total() == 2000000
    assert host_memory.available() == 1500000


@pytest.mark.parametrize(
    ("file", "text"),
    [("memory.max", "max"), ("memory.limit_in_bytes", str(0x7FFFFFFFFFFFF000))],
)
def test_no_limit_is_no_limit(cgroup, file, text):
    (cgroup / file).write_text(text)
    assert host_memory.total() == psutil.virtual_memory().total


def test_the_lowest_limit_above_the_process_counts(cgroup, tmp_path, monkeypatch):
    membership = tmp_path / "membership"
    membership.write_text("0::/jobs/mine\n")
    monkeypatch.setattr(host_memory, "_MEMBERSHIP", membership)
    (cgroup / "jobs" / "mine").mkdir(parents=True)
    (cgroup / "jobs" / "mine" / "memory.max").write_text("3000000")
    assert host_memory.total() == 3000000
    (cgroup / "jobs" / "memory.max").write_text("1000000")
    assert host_memory.total() == 1000000


def test_a_full_cgroup_has_nothing_left(cgroup):
    (cgroup / "memory.max").write_text("1000")
    (cgroup / "memory.current").write_text("1500")
    assert host_memory.available() == 0


def test_peak_is_never_below_the_present():
    present = host_memory.resident()
    assert present > 0
    assert host_memory.peak_resident() > present - 2**20  # the kernel counts in batches of pages
