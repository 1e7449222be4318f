import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from msllm.engine.training import checkpoint_folder
from msllm.engine.training.checkpoint_folder import (
    MANIFEST,
    Checkpoint,
    Manifest,
    begin,
    commit,
    complete,
    describe,
    fault_of,
    latest_complete,
    open_checkpoint,
    prune,
    recover,
)
from msllm.errors import InputError


def content(step: int) -> dict[str, bytes]:
    """Files of a step's checkpoint, every byte of which depends on the step."""
    return {
        "common.pt": bytes([step % 251]) * 100,
        "shards/__0_0.distcp": bytes([step % 251]) * 5000,
        "shards/deep/__1_0.distcp": bytes([step % 251]) * 7,
        "empty": b"",
        ".metadata": bytes([step % 251]) * 31,
    }


def save(root: Path, step: int) -> Checkpoint:
    folder = begin(root, step)
    for name, data in content(step).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return commit(folder, Manifest(step=step, consumed_samples=step * 8, layout={"tp": 2}))


def assert_whole(checkpoint: Checkpoint) -> None:
    """Every byte is there: more than the module itself looks at."""
    for name, data in content(checkpoint.step).items():
        assert (checkpoint.path / name).read_bytes() == data


def newest(root: Path) -> int | None:
    found = latest_complete(root).checkpoint
    if found is not None:
        assert_whole(found)
    return found.step if found else None


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_a_saved_checkpoint_is_found_with_its_facts(tmp_path: Path) -> None:
    saved = save(tmp_path, 100)
    assert saved.path == tmp_path / "step-00000100"
    found = latest_complete(tmp_path)
    assert found.checkpoint == saved
    assert found.notes == ()
    assert found.checkpoint.manifest.consumed_samples == 800
    assert found.checkpoint.manifest.files == {k: len(v) for k, v in content(100).items()}
    assert describe(saved.manifest)["saved with"] == "tp2"
    assert_whole(saved)


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert latest_complete(tmp_path / "missing").checkpoint is None
    assert latest_complete(tmp_path).checkpoint is None
    assert recover(tmp_path / "missing") == []


def test_the_newest_is_the_highest_step_also_past_eight_digits(tmp_path: Path) -> None:
    for step in (20, 100_000_000, 3):
        save(tmp_path, step)
    assert newest(tmp_path) == 100_000_000
    assert [c.step for c in complete(tmp_path)] == [100_000_000, 20, 3]


def test_an_unfinished_save_is_not_found_and_is_tidied(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (begin(tmp_path, 2) / "half").write_bytes(b"x")
    assert newest(tmp_path) == 1
    assert recover(tmp_path) == ["removed the unfinished save of step 2"]
    assert names(tmp_path) == ["step-00000001"]


def test_a_save_starts_clean_over_what_was_left(tmp_path: Path) -> None:
    (begin(tmp_path, 2) / "from-a-run-that-died").write_bytes(b"x")
    saved = save(tmp_path, 2)
    assert "from-a-run-that-died" not in saved.manifest.files
    assert not (saved.path / "from-a-run-that-died").exists()


def truncate(folder: Path) -> None:
    with (folder / "shards/__0_0.distcp").open("r+b") as file:
        file.truncate(4999)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncate, "4,999 bytes instead of 5,000"),
    "missing": (lambda f: (f / "common.pt").unlink(), "common.pt is missing"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "never finished"),
    "half manifest": (lambda f: (f / MANIFEST).write_text('{"step": 2, "fil'), "damaged"),
    "empty manifest": (lambda f: (f / MANIFEST).write_text(""), "damaged"),
    "foreign manifest": (lambda f: (f / MANIFEST).write_text('{"step": -1}'), "damaged"),
    "manifest a folder": (
        lambda f: ((f / MANIFEST).unlink(), (f / MANIFEST).mkdir()),
        "no regular file",
    ),
    "newer format": (
        lambda f: (f / MANIFEST).write_text('{"format": 99, "step": 2}'),
        "newer msllm",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    broken = save(tmp_path, 2)
    harm, reason = DAMAGE[damage]
    harm(broken.path)
    assert newest(tmp_path) == 1
    (note,) = latest_complete(tmp_path).notes
    assert note.startswith("step-00000002 is passed over")
    assert reason in note
    assert reason in str(fault_of(broken.path))


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_saved_again(tmp_path: Path) -> None:
    truncate(save(tmp_path, 2).path)
    save(tmp_path, 2)
    assert newest(tmp_path) == 2
    assert names(tmp_path) == ["step-00000002"]


def test_opening_takes_a_checkpoint_its_parent_or_the_run(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1)
    two = save(root, 2)
    for path in (two.path, root, tmp_path):
        assert open_checkpoint(path) == two
    assert open_checkpoint(root / "step-00000001").step == 1


def test_opening_anything_else_is_an_input_error(tmp_path: Path) -> None:
    truncate(save(tmp_path / "a", 1).path)
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a/step-00000001", tmp_path / "a", tmp_path / "b", tmp_path / "none"):
        with pytest.raises(InputError, match="not a complete checkpoint") as caught:
            open_checkpoint(path)
        assert caught.value.problems[0].where == "--resume"


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    removed = prune(tmp_path, 2)
    assert [p.name for p in removed] == ["step-00000002", "step-00000001"]
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert prune(tmp_path, 2) == []
    assert prune(tmp_path, 0) == []


def test_pruning_counts_only_complete_checkpoints(tmp_path: Path) -> None:
    """A broken or unfinished newer save must not cost the last good one."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    truncate(tmp_path / "step-00000003")
    begin(tmp_path, 4)
    prune(tmp_path, 1)
    assert newest(tmp_path) == 2


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-best").mkdir()
    save(tmp_path, 1)
    recover(tmp_path)
    prune(tmp_path, 1)
    assert names(tmp_path) == ["notes.txt", "step-00000001", "step-best"]


def test_a_file_system_that_cannot_sync_folders_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "no")
        real(handle)

    monkeypatch.setattr("os.fsync", fsync)
    save(tmp_path, 1)
    assert newest(tmp_path) == 1


class PowerCut(BaseException):
    """Not an Exception: nothing may catch it and tidy up, as nothing tidies up after kill -9."""


class Failing:
    """Stands for a module and stops at the n-th call of one of its functions that change the disk.

    `before` says whether the call itself still happens.
    """

    def __init__(self, real: Any, names: set[str], clock: Iterator[int], stop: int, before: bool):
        self._real, self._names, self._clock = real, names, clock
        self._stop, self._before = stop, before

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real, name)
        if name not in self._names:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            due = next(self._clock) == self._stop
            if due and self._before:
                raise PowerCut
            result = function(*args, **kwargs)
            if due:
                raise PowerCut
            return result

        return call


def cut_at(monkeypatch: pytest.MonkeyPatch, stop: int, before: bool) -> None:
    clock = itertools.count()
    for module, calls in ((os, {"fsync", "replace", "open"}), (shutil, {"rmtree"})):
        monkeypatch.setattr(
            checkpoint_folder, module.__name__, Failing(module, calls, clock, stop, before)
        )


def half_rmtree(path: Path, *_: Any, **__: Any) -> None:
    """Remove one file of a folder, then lose power."""
    next(p for p in sorted(Path(path).rglob("*")) if p.is_file()).unlink()
    raise PowerCut


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step again"])
def test_a_power_cut_at_any_point_costs_at_most_the_newest(
    tmp_path: Path, before: bool, again: bool
) -> None:
    """Stop a save and its pruning at each of its disk operations in turn, then resume.

    After each stop: what is found is whole and is the save before or the new one; after `recover`
    the same holds, nothing is left over, and the next save works.
    """
    outcomes = set()
    for stop in itertools.count():
        root = tmp_path / f"{stop}"
        save(root, 1)
        save(root, 2)
        step = 2 if again else 3
        with pytest.MonkeyPatch.context() as patch:
            cut_at(patch, stop, before)
            try:
                save(root, step)
                prune(root, 2)
                finished = True
            except PowerCut:
                finished = False
        assert newest(root) in ({1, 2} if again else {2, 3})
        recover(root)
        found = newest(root)
        assert found in ({2} if again else {2, 3}), f"stopped at {stop}"
        assert all(name.startswith("step-") for name in names(root))
        outcomes.add(found)
        save(root, 4)
        assert newest(root) == 4
        if finished:
            break
    assert stop > 10
    assert outcomes == ({2} if again else {2, 3})


def test_a_power_cut_amid_a_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.rmtree", half_rmtree)
        with pytest.raises(PowerCut):
            prune(tmp_path, 1)
    assert newest(tmp_path) == 3
    recover(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_power_cut_amid_recovery(tmp_path: Path) -> None:
    """Recovery itself may be stopped anywhere, and done again."""
    for stop in itertools.count():
        root = tmp_path / f"{stop}"
        save(root, 1)
        os.replace(save(root, 2).path, root / ".tmp-step-00000002")
        os.replace(save(root, 1).path, root / ".old-step-00000001")
        (begin(root, 3) / "half").write_bytes(b"x")
        with pytest.MonkeyPatch.context() as patch:
            cut_at(patch, stop, True)
            try:
                recover(root)
                finished = True
            except PowerCut:
                finished = False
        recover(root)
        assert names(root) == ["step-00000001", "step-00000002"]
        assert newest(root) == 2
        if finished:
            break
    assert stop > 3


WRITER = """
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from checkpoint_writer_content import content
    from msllm.engine.training.checkpoint_folder import *
    root = Path(sys.argv[1])
    recover(root)
    found = latest_complete(root).checkpoint
    step = found.step if found else 0
    print("ready", step, flush=True)
    while True:
        step += 1
        folder = begin(root, step)
        for name, data in content(step).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        commit(folder, Manifest(step=step))
        print("saved", step, flush=True)
        prune(root, 1)
"""


def test_kill_9_at_any_moment_keeps_what_was_saved(tmp_path: Path) -> None:
    """A real process saves in a loop with `keep 1` and is killed a dozen times, at random moments.

    Each time the newest complete checkpoint is whole, and not older than what it reported saved.
    """
    (tmp_path / "checkpoint_writer_content.py").write_text(
        "def content(step):\n"
        "    b = bytes([step % 251])\n"
        "    return {'common.pt': b * 100, 'shards/__0_0.distcp': b * 5000,\n"
        "            'shards/deep/__1_0.distcp': b * 7, 'empty': b'',\n"
        "            '.metadata': b * 31}\n"
    )
    root, moments = tmp_path / "checkpoints", random.Random(0)
    script = textwrap.dedent(WRITER)
    newest_before = 0
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(root), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["ready", str(newest_before)]
        time.sleep(moments.uniform(0.0, 0.12))
        process.send_signal(signal.SIGKILL)
        reported = [line.split() for line in process.stdout.read().splitlines()]
        process.wait()
        saved = max((int(w[1]) for w in reported if len(w) == 2), default=newest_before)
        found = newest(root)
        assert (found or 0) >= saved
        assert (found or 0) <= saved + 1
        # A finished but unnamed save is recovered by the next start, so look after recovery.
        recover(root)
        newest_before = newest(root) or 0
        assert newest_before >= (found or 0)
    assert newest_before > 12


def test_everything_is_on_disk_before_the_name_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file and folder is synced before the rename, and the name itself after it."""
    synced: set[int] = set()
    checked = []
    fsync, replace = os.fsync, os.replace

    def note(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def rename(old: Any, new: Any) -> None:
        if Path(new).name == "step-00000005":
            inside = [Path(old), *Path(old).rglob("*")]
            assert (Path(old) / MANIFEST) in inside
            checked.extend(p for p in inside if p.stat().st_ino not in synced)
            checked.append("renamed")
            synced.clear()
        replace(old, new)

    monkeypatch.setattr("os.fsync", note)
    monkeypatch.setattr("os.replace", rename)
    save(tmp_path, 5)
    assert checked == ["renamed"]
    assert tmp_path.stat().st_ino in synced
