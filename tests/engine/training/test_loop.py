"""Whole small runs in real processes: stopped, killed and moved, they keep their curve."""

from __future__ import annotations

import os
import resource
import signal

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("loop")]

DP2 = {"launch": {"npus": 2}}


def losses(curve):
    return [loss for loss, _ in curve]


def test_a_run_learns_and_leaves_complete_checkpoints(runs, straight):
    assert len(straight) == 12
    assert straight[-1][0] < straight[0][0]
    assert runs.checkpoints("straight") == ["step-00000004", "step-00000008", "step-00000012"]
    last = runs.metrics("straight")[-1]
    assert last["consumed_samples"] == 48  # beyond the 43 samples of an epoch
    assert last["tokens"] == 64
    assert last["lr"] == 0.0
    assert last["mfu"] > 0
    assert last["memory_bytes"] > 100 << 20


def test_tensorboard_has_the_curve(runs, straight):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(runs.folder("straight") / "tensorboard"))
    events.Reload()
    found = [event.value for event in events.Scalars("train/loss")]
    assert found == pytest.approx(losses(straight), rel=1e-6)


def test_resumed_run_is_bitwise_the_straight_one(runs, straight):
    """Stopped after 8 of 12 steps, across an epoch's end; then the same settings with 12."""
    fixed = {"decay_steps": 12}
    runs.run("resumed", train={"steps": 8} | fixed)
    runs.run("resumed", train={"steps": 12} | fixed)
    assert runs.curve("resumed") == straight


@pytest.mark.parametrize(
    ("name", "over"),
    [
        ("dp2", DP2),
        ("tp2", DP2 | {"layout": {"tp": 2}}),
        ("pp2", DP2 | {"layout": {"pp": 2}}),
    ],
)
def test_resumed_at_another_layout(runs, straight, name, over):
    runs.cut("straight", f"to-{name}", 8)
    runs.run(f"to-{name}", **over)
    curve = runs.curve(f"to-{name}")
    assert curve[:8] == straight[:8]
    assert losses(curve) == pytest.approx(losses(straight), rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_saves_and_the_run_goes_on(runs, straight, number):
    name = f"stopped-{int(number)}"
    status, output = runs.stop_at(name, 5, number)
    assert status == 130, output
    done = len(runs.metrics(name))
    if done < 12:
        assert f"step-{done:08d}" in runs.checkpoints(name)
    runs.run(name)
    assert runs.curve(name) == straight
    assert runs.gone(name)


def test_launcher_killed(runs, straight):
    process = runs.start("launcher-killed")
    try:
        runs.wait_for(lambda: len(runs.metrics("launcher-killed")) >= 6, process)
        sessions = runs.workers("launcher-killed")
    finally:
        process.kill()
        process.communicate(timeout=900)
    assert sessions
    assert runs.all_ended(sessions)  # also what Megatron started to write the checkpoint of step 4
    end = runs.start("launcher-killed")  # the new run must not meet workers of the old one
    output = end.communicate(timeout=900)[0]
    assert end.returncode == 0, output
    assert runs.curve("launcher-killed") == straight


def test_worker_killed(runs, straight):
    process = runs.start("worker-killed", **DP2)
    try:
        runs.wait_for(lambda: len(runs.metrics("worker-killed")) >= 6, process)
        sessions = runs.workers("worker-killed")
        os.kill(sessions[-1], signal.SIGKILL)
        output = process.communicate(timeout=900)[0]
    finally:
        process.kill()
    assert process.returncode == 1
    assert "SIGKILL" in output
    assert runs.all_ended(sessions)
    runs.run("worker-killed", **DP2)
    assert losses(runs.curve("worker-killed")) == pytest.approx(losses(straight), rel=1e-5)
    assert not [name for name in runs.checkpoints("worker-killed") if name.startswith(".")]


def test_loss_that_is_no_number_stops_the_run(runs):
    """A learning rate that throws the weights out of range within a few steps."""
    over = {"train": {"lr": 1e38, "clip_grad": 0.0}, "checkpoint": {"save_interval": 1}} | DP2
    output = runs.run("diverged", status=1, **over)
    assert "step" in output
    assert "rank" in output
    assert "became nan" in output or "became inf" in output
    steps = len(runs.metrics("diverged"))
    assert runs.checkpoints("diverged") == [f"step-{s:08d}" for s in range(1, steps + 1)]


def test_background_saves_are_those_of_their_step(runs, straight):
    fixed = {"decay_steps": 12}
    checkpoint = {"async_save": True, "save_interval": 2, "keep": 2}
    runs.run("background", train={"steps": 8} | fixed, checkpoint=checkpoint)
    assert runs.checkpoints("background") == ["step-00000006", "step-00000008"]
    runs.run("background", train={"steps": 12} | fixed, checkpoint=checkpoint)
    assert runs.curve("background") == straight
    written, known = runs.tensors("background", 12), runs.tensors("straight", 12)
    assert written.keys() == known.keys()
    assert len([name for name in known if "exp_avg" in name]) >= 2
    assert all(written[name].equal(known[name]) for name in known)


def test_a_broken_newest_checkpoint_falls_back_to_the_one_before(runs, straight):
    runs.cut("straight", "broken", 8)
    newest = runs.folder("broken") / "checkpoints" / "step-00000008"
    victim = max(newest.glob("*.distcp"), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    runs.run("broken")
    assert runs.curve("broken") == straight
    assert "passed over" in (runs.folder("broken") / "events.jsonl").read_text()


def test_validation_does_not_disturb_training(runs):
    data = {"valid_fraction": 0.2}
    runs.run("unvalidated", data=data)
    validated = {"eval_interval": 4, "eval_batches": 2}
    runs.run("validated", data=data, train=validated)
    runs.run("validated-dp2", data=data, train=validated, **DP2)
    assert runs.curve("validated") == runs.curve("unvalidated")
    found = [m["valid_loss"] for m in runs.metrics("validated")]
    assert [i + 1 for i, loss in enumerate(found) if loss is not None] == [4, 8, 12]
    two = [m["valid_loss"] for m in runs.metrics("validated-dp2")]
    assert [v for v in two if v] == pytest.approx([v for v in found if v], rel=1e-5)


def test_bf16_resumes_bitwise(runs):
    runs.run("bf16", dtype="bf16", train={"steps": 8})
    runs.cut("bf16", "bf16-resumed", 4)
    runs.run("bf16-resumed", dtype="bf16", train={"steps": 8})
    assert runs.curve("bf16-resumed") == runs.curve("bf16")


def test_a_checkpoint_by_path_and_one_of_another_optimizer(runs, straight):
    path = str(runs.folder("straight") / "checkpoints" / "step-00000008")
    runs.run("by-path", checkpoint={"resume": path})
    assert [m["step"] for m in runs.metrics("by-path")] == [9, 10, 11, 12]
    assert [(m["loss"], m["grad_norm"]) for m in runs.metrics("by-path")] == straight[8:]
    other = {"checkpoint": {"resume": path}, "layout": {"distributed_optimizer": False}}
    assert "another optimizer" in runs.run("other-optimizer", status=1, **other)


@pytest.mark.parametrize(
    ("name", "over"),
    [
        ("unshuffled", DP2 | {"data": {"shuffle": False}}),
        ("experts", DP2 | {"layout": {"ep": 2}, "checkpoint": {"async_save": True}}),
    ],
)
def test_other_runs_resume_bitwise(runs, name, over):
    """Data in its own order; experts spread over ranks, saved behind the scenes."""
    model = str(runs.experts if name == "experts" else runs.model)
    runs.run(name, model=model, **over)
    runs.cut(name, f"{name}-resumed", 8)
    runs.run(f"{name}-resumed", model=model, **over)
    assert runs.curve(f"{name}-resumed") == runs.curve(name)
    consumed = [m["consumed_samples"] for m in runs.metrics(f"{name}-resumed")]
    assert consumed == [4 * step for step in range(1, 13)]


def test_never_resumes_when_told_so(runs, straight):
    runs.cut("straight", "again", 4)
    fixed = {"steps": 5, "decay_steps": 12}
    runs.run("again", train=fixed, checkpoint={"resume": "never", "save_interval": 0})
    assert runs.curve("again") == straight[:5]
    started = [m["time"] for m in runs.metrics("again")]
    assert started[0] > runs.metrics("straight")[0]["time"]


@pytest.mark.parametrize("background", [False, True])
def test_killed_while_it_saves(runs, straight, background):
    """Whatever a kill in the middle of a save leaves, what is loaded is whole."""
    name = f"killed-in-save-{background}"
    over = {"checkpoint": {"save_interval": 1, "async_save": background}}
    process = runs.start(name, **over)
    try:
        runs.wait_for(lambda: unfinished(runs, name) and len(runs.metrics(name)) >= 3, process)
        process.kill()
        process.communicate(timeout=900)
    finally:
        process.kill()
    assert any(step.startswith("step-") for step in runs.checkpoints(name))
    runs.run(name, **over)
    assert runs.curve(name) == straight
    assert runs.checkpoints(name) == [f"step-{step:08d}" for step in range(1, 13)]
    assert "resumed from the checkpoint of step" in (runs.folder(name) / "events.jsonl").read_text()


def unfinished(runs, name):
    return [folder for folder in runs.checkpoints(name) if folder.startswith(".tmp-")]


@pytest.mark.parametrize("background", [False, True])
def test_disk_full_in_a_save(runs, straight, background):
    """No file may grow beyond 100 KB: the save fails, what was saved before stays."""
    name = f"disk-full-{background}"
    runs.cut("straight", name, 4)
    limit = (resource.RLIMIT_FSIZE, 100_000)
    checkpoint = {"save_interval": 4, "async_save": background}
    output = runs.run(name, status=1, limit=limit, checkpoint=checkpoint)
    assert "the checkpoint of step 8 could not be written: " in output
    assert str(runs.folder(name) / "checkpoints") in output
    assert "GiB are free there" in output
    assert "Traceback" not in output
    assert [step for step in runs.checkpoints(name) if step[0] != "."] == ["step-00000004"]
    runs.run(name)
    assert runs.curve(name) == straight


def test_out_of_memory_says_what_was_planned(runs):
    """A batch whose first activations alone are more than the process may have."""
    huge = {"train": {"steps": 1, "micro_batch": 1 << 17, "global_batch": 1 << 17}}
    data = {"paths": ["mock"], "seq_length": 256}
    limit = (resource.RLIMIT_AS, 8 << 30)
    output = runs.run("too-large", status=1, limit=limit, data=data, **huge)
    assert "rank 0 ran out of memory; planned a device: parameters" in output
    assert "activations" in output
    assert "--micro-batch 65536" in output
    assert output.count("; or ") == 2
