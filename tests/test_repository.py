"""The repository's own habits: pinned versions, the files check, the demo's guards."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def load(path: str) -> ModuleType:
    """Import a script that belongs to no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_is_pinned_to_a_version_that_it_allows() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition("==") for line in lines if not line.startswith("#")]
    versions = {canonical(name): version for name, _, version in pins}
    assert all("+" not in version and "@" not in version for version in versions.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    for requirement in map(Requirement, wanted):
        version = versions.get(canonical(requirement.name))
        assert version is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(version, prereleases=True), str(requirement)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"x = 1 \n", "a.py:1: white space"),
        (b"x = 1", "one newline"),
        (b"x = 1\n\n", "one newline"),
        (b"x = 1\r\n", "carriage returns"),
        (b"<<<<<<< HEAD\n", "a.py:1: a merge mark"),
        (b"\xff\xfe\n", "UTF-8"),
        (b"#" * 300_000 + b"\n", "kB"),
    ],
)
def test_the_files_check_sees_each_fault(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "a.py").write_bytes(content)
    script = str(ROOT / "scripts" / "check_files.py")
    done = subprocess.run(
        [sys.executable, script, "a.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert fault in done.stdout


def test_the_files_check_passes_what_is_clean(tmp_path: Path) -> None:
    check = load("scripts/check_files.py")
    (tmp_path / "a.py").write_text("名 = 1\n", encoding="utf-8")
    (tmp_path / "empty").touch()
    (tmp_path / "p.png").write_bytes(b"\x89PNG\r\n ")
    assert [f for p in tmp_path.iterdir() for f in check.faults(p)] == []


def test_the_demo_has_text_enough_on_this_machine(tmp_path: Path) -> None:
    demo = load("examples/demo.py")
    path = tmp_path / "corpus.jsonl"
    demo.write_corpus(path)
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert sum(map(len, texts)) > 4_000_000
    assert any("def " in text for text in texts)
    assert path.stat().st_size < 15_000_000


def test_the_demo_replaces_its_own_folder_only(tmp_path: Path) -> None:
    demo = load("examples/demo.py")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="holds something else"):
        demo.fresh_folder(mine)
    assert (mine / "thesis.txt").exists()
    demo.fresh_folder(tmp_path / "demo")
    (tmp_path / "demo" / "old").touch()
    demo.fresh_folder(tmp_path / "demo")
    assert not (tmp_path / "demo" / "old").exists()


@pytest.mark.parametrize(
    ("curve", "steps", "message"),
    [([10.0, 6.1], 2, "60%"), ([10.0, 4.0], 3, "2 steps"), ([10.0, float("nan")], 2, "60%")],
)
def test_the_demo_fails_where_it_should(
    tmp_path: Path, curve: list[float], steps: int, message: str
) -> None:
    demo = load("examples/demo.py")
    with pytest.raises(SystemExit, match=message):
        demo.report(curve, steps, tmp_path)
    demo.report([10.0, 5.9], 2, tmp_path)


@pytest.mark.parametrize("steps", [[1, 2, 2, 3], [1, 3], [2, 3]])
def test_the_demo_sees_steps_that_are_doubled_or_missing(tmp_path: Path, steps: list[int]) -> None:
    demo = load("examples/demo.py")
    lines = (json.dumps({"step": s, "loss": 1.0}) + "\n" for s in steps)
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    with pytest.raises(SystemExit, match="each step once"):
        demo.losses(tmp_path)
