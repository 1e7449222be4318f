"""Pickled weights, as torch and transformers' layout of shards write them; and hostile ones."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from msllm.engine.weights.pickled import INDEX, SINGLE, PickledWeights
from msllm.errors import InputError
from msllm.models.weight_map import Run

TENSORS = {
    "embed": torch.arange(60, dtype=torch.float32).reshape(12, 5),
    "norm": torch.ones(7, dtype=torch.bfloat16),
    "head": torch.randn(4, 6).half(),
    "turned": torch.randn(6, 4).t(),
    "steps": torch.tensor(3),
}
MODERN, LEGACY = True, False


def save(tensors, path: Path, modern: bool = MODERN) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=modern)


def shards(folder: Path, modern: bool) -> None:
    names = list(TENSORS)
    files = {n: f"pytorch_model-0000{1 + (i > 1)}-of-00002.bin" for i, n in enumerate(names)}
    for file in set(files.values()):
        save({n: TENSORS[n] for n in names if files[n] == file}, folder / file, modern)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("modern", [MODERN, LEGACY])
@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_come_back(tmp_path, modern, sharded):
    if sharded:
        shards(tmp_path, modern)
    else:
        save(TENSORS, tmp_path / SINGLE, modern)
    weights = PickledWeights(tmp_path)
    assert {n: (e.shape, e.dtype) for n, e in weights.entries.items()} == {
        "embed": ((12, 5), "F32"),
        "norm": ((7,), "BF16"),
        "head": ((4, 6), "F16"),
        "turned": ((4, 6), "F32"),
        "steps": ((), "I64"),
    }
    for name in ("embed", "head", "norm", "turned", "embed"):
        assert torch.equal(weights.rows(Run(name, 1, 3)), TENSORS[name][1:4])
    assert torch.equal(weights.rows(Run("embed", 2, 4), (1, 2)), TENSORS["embed"][2:6, 1:3])


def test_rows_are_copies(tmp_path):
    save(TENSORS, tmp_path / SINGLE)
    weights = PickledWeights(tmp_path)
    weights.rows(Run("embed", 0, 2)).zero_()
    assert torch.equal(weights.rows(Run("embed", 0, 2)), TENSORS["embed"][:2])


def read_bytes() -> int:
    """What this process has read by calls; pages of mapped files do not count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def test_files_are_mapped_not_read(tmp_path):
    save({"large": torch.zeros(16_000_000)}, tmp_path / SINGLE)
    before = read_bytes()
    weights = PickledWeights(tmp_path)
    assert weights.rows(Run("large", 15_999_990, 10)).shape == (10,)
    assert read_bytes() - before < 4_000_000


class Hostile:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["modern", "legacy", "plain pickle"])
def test_code_in_a_pickle_is_not_run(tmp_path, form):
    trap = tmp_path / "trap"
    content = {"embed": TENSORS["embed"], "x": Hostile(trap)}
    if form == "plain pickle":
        (tmp_path / SINGLE).write_bytes(pickle.dumps(content))
    else:
        save(content, tmp_path / SINGLE, form == "modern")
    with pytest.raises(InputError, match="nothing of it was run"):
        PickledWeights(tmp_path)
    assert not trap.exists()
    if form == "plain pickle":
        pickle.loads((tmp_path / SINGLE).read_bytes())
    else:
        torch.load(tmp_path / SINGLE, weights_only=False)
    assert trap.exists(), "the trap is none"


@pytest.mark.parametrize("modern", [MODERN, LEGACY])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
def test_truncated_files(tmp_path, modern, kept):
    path = tmp_path / SINGLE
    save({"large": torch.randn(1000, 100)}, path, modern)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(InputError, match="damaged"):
        PickledWeights(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04", b"\x80\x02]"])
def test_other_files(tmp_path, content):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(InputError, match=r"damaged|no pickle of tensors alone"):
        PickledWeights(tmp_path)


@pytest.mark.parametrize("content", [[1, 2], {"step": 3}, torch.ones(2), {"model": {}}])
def test_what_is_no_dictionary_of_tensors(tmp_path, content):
    save(content, tmp_path / SINGLE)
    with pytest.raises(InputError, match="no dictionary of tensors"):
        PickledWeights(tmp_path)


def test_missing_shards_and_tensors_are_told_together(tmp_path):
    with pytest.raises(InputError, match="no pickled weights"):
        PickledWeights(tmp_path)
    shards(tmp_path, MODERN)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(tmp_path.glob("*.bin"))
    moved = [path.rename(path.with_suffix(".away")) for path in files]
    with pytest.raises(InputError) as caught:
        PickledWeights(tmp_path)
    assert [p.problem for p in caught.value.problems] == [f"{f.name} is missing" for f in files]
    for path in moved:
        path.rename(path.with_suffix(".bin"))
    index["weight_map"] |= {"ghost": files[0].name, "steps": files[0].name}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError) as caught:
        PickledWeights(tmp_path)
    assert {p.problem.split()[0] for p in caught.value.problems} == {"ghost", "steps"}
