"""Each part of the doctor says what is so, on machines that are made up and on this one."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from msllm.cli.app import run
from msllm.engine.doctor import Verdict, accelerators, environment, nodes, software, storage
from msllm.errors import Problem


def by_name(findings):
    return {finding.about: finding for finding in findings}


@pytest.fixture
def cann(tmp_path):
    (tmp_path / "version.cfg").write_text("runtime_installed_version=[9.0.0:9.0.0]\n")
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "version.info").write_text("Version=25.2.0\nfirmware=7.1\n")
    return tmp_path


def judged(monkeypatch, cann: Path | None, driver: Path, **versions: str):
    real = software.version
    monkeypatch.setattr(software, "version", lambda name: versions.get(name, real(name)))
    env = {} if cann is None else {"ASCEND_HOME_PATH": str(cann)}
    return by_name(software.findings(env, driver))


@pytest.mark.parametrize(
    ("torch", "npu", "verdicts"),
    [
        ("2.10.0+cpu", "2.10.0", (Verdict.OK, Verdict.OK)),
        ("2.10.0", "2.9.0.post1", (Verdict.FAULT, Verdict.OK)),
        ("2.13.0", "2.13.0", (Verdict.OK, Verdict.WARNING)),
    ],
)
def test_versions_that_pair_and_that_do_not(monkeypatch, cann, torch, npu, verdicts):
    found = judged(monkeypatch, cann, cann / "driver/version.info", torch=torch, torch_npu=npu)
    assert (found["torch_npu"].verdict, found["CANN"].verdict) == verdicts
    assert found["driver"].found == "25.2.0"
    assert "9.0.0" in found["CANN"].found


def test_torch_npu_without_cann_and_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(software, "CANN_DEFAULT", tmp_path / "none")
    found = judged(monkeypatch, None, tmp_path / "version.info", torch="2.9.0", torch_npu="2.9.0")
    assert found["CANN"].verdict is found["driver"].verdict is Verdict.FAULT
    assert "set_env.sh" in found["CANN"].mend


def test_a_package_that_is_too_old(monkeypatch, tmp_path):
    found = judged(monkeypatch, None, tmp_path, transformers="4.57.0")
    assert found["transformers"].verdict is Verdict.FAULT
    assert "transformers>=5.0" in found["transformers"].mend.replace("'", "")
    assert "packages" not in found


def test_what_is_installed_here_is_what_is_needed():
    assert by_name(software.findings({}))["packages"].verdict is Verdict.OK


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("ASCEND_LAUNCH_BLOCKING", "1", "0"),
        ("HCCL_CONNECT_TIMEOUT", "60", "1800"),
        ("ASCEND_RT_VISIBLE_DEVICES", "all", "0,1,4-7"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "OFF"),
    ],
)
def test_variables(name, bad, good):
    assert by_name(environment.findings({name: bad}))[name].verdict is Verdict.WARNING
    assert by_name(environment.findings({name: good}))["variables"].verdict is Verdict.OK


def test_a_variable_that_wins_over_msllms_own_is_told():
    found = by_name(environment.findings({"HCCL_EXEC_TIMEOUT": "900"}))["HCCL_EXEC_TIMEOUT"]
    assert found.verdict is Verdict.NOTE
    assert "1800" in found.found


def test_disks(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    inner = (tmp_path / "shared disk" / "runs").resolve()
    inner.mkdir(parents=True)
    point = str(inner.parent).replace(" ", "\\040")
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {point} nfs4 rw 0 0\n")
    assert storage.file_system(inner, mounts) == "nfs4"
    assert storage.file_system(Path("/"), mounts) == "ext4"
    monkeypatch.setattr(storage, "file_system", lambda folder: "ext4")
    alone = by_name(storage.findings(tmp_path / "new" / "runs", 0))
    assert "shared storage" not in alone
    together = by_name(storage.findings(tmp_path, 3))
    assert together["shared storage"].verdict is Verdict.WARNING
    monkeypatch.setattr(storage, "LEAST_FREE", 2**80)
    assert by_name(storage.findings(tmp_path, 0))[f"disk of {tmp_path}"].verdict is Verdict.WARNING


def test_nodes():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        hosts = [f"127.0.0.1:{port}", "no-such-host.invalid", "127.0.0.1:port"]
        listening, unknown, wrong = nodes.findings(hosts)
    assert (listening.verdict, unknown.verdict) == (Verdict.OK, Verdict.FAULT)
    assert (wrong.verdict, wrong.mend) == (Verdict.FAULT, "write HOST or HOST:PORT")
    (quiet,) = nodes.findings([f"127.0.0.1:{port}"])  # closed now: the host still answers
    assert quiet.verdict is Verdict.OK
    assert "nothing listens" in quiet.found


def test_devices(monkeypatch):
    class Fake:
        def __init__(self, kind, index=0):
            self.kind, self.index, self.name = kind, index, "Ascend910B2"

        def total_memory(self):
            return 64 * 2**30

        def free_memory(self):
            if self.index == 2:
                raise RuntimeError("rtMalloc failed")
            return (60 if self.index == 0 else 20) * 2**30

    monkeypatch.setattr(accelerators, "Device", Fake)
    monkeypatch.setattr(accelerators, "device_count", lambda kind: 3)
    monkeypatch.setattr(
        accelerators, "probe", lambda kind: None if kind == "npu" else Problem("none")
    )
    found = by_name(accelerators.findings())
    verdicts = [found[f"npu:{index}"].verdict for index in range(3)]
    assert verdicts == [Verdict.OK, Verdict.WARNING, Verdict.FAULT]
    assert "accelerator" not in found


def test_the_command(capsys, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert run(["doctor", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "nothing keeps training from running" in said
    assert run(["doctor", "--node", "127.0.0.1:port", "--format", "json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert not record["fit"]
    assert {"about", "verdict", "found", "mend"} == set(record["findings"][0])
    assert run(["doctor", "--format", "yaml"]) == 2
