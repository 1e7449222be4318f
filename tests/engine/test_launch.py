"""Real worker processes under the launcher: ends, failures, signals, logs, two machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from msllm.config import LaunchConfig
from msllm.engine import launch as launching
from msllm.engine.failure import Failure, report_error
from msllm.engine.launch import launch
from msllm.engine.placement import placement
from msllm.errors import Interrupted, Problem, RunError

pytestmark = pytest.mark.distributed

WORKER = """
import os, signal, sys, time
from pathlib import Path
from msllm.engine.launch import report_error, watch_parent
from msllm.errors import RunError

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])

def until(path):
    while not path.exists():
        time.sleep(0.02)

def mark(name, text=""):
    path = folder / f"{name}.{rank}.tmp"
    path.write_text(text)
    path.rename(folder / f"{name}.{rank}")

def guarded(body):
    watch_parent()
    try:
        body()
    except BaseException as error:
        report_error(error)
        raise
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Write a worker module; gives a function from its body to the module's name."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def write(body: str) -> str:
        (tmp_path / "trivial.py").write_text(WORKER + textwrap.dedent(body))
        return "trivial"

    return write


def start(module, tmp_path, npus=2, watcher=None, environment=None, **config):
    launch(
        module,
        [str(tmp_path)],
        LaunchConfig(npus=npus, **config),
        tmp_path / "logs",
        watcher,
        environment,
    )


def log(tmp_path, rank) -> str:
    return (tmp_path / "logs" / f"rank_{rank:04d}.log").read_text()


def test_each_device_gets_a_process_that_knows_its_place(worker, tmp_path):
    names = (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"
    )  # fmt: skip
    module = worker(f"import json\nmark('env', json.dumps([os.environ[n] for n in {names}]))")
    start(module, tmp_path, npus=3)
    cores = str(max(1, len(os.sched_getaffinity(0)) // 3))
    for rank in range(3):
        place = json.loads((tmp_path / f"env.{rank}").read_text())
        assert place == [str(rank), str(rank), "3", "3", "127.0.0.1", cores]


def test_threads_that_the_user_chose_stay(worker, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    module = worker("mark('env', os.environ['OMP_NUM_THREADS'] + os.environ['EXTRA'])")
    start(module, tmp_path, npus=1, environment={"EXTRA": "x"})
    assert (tmp_path / "env.0").read_text() == "7x"


def test_both_streams_of_every_rank_are_in_its_log(worker, tmp_path):
    module = worker(
        """
        for i in range(3):
            print(f"out {rank} {i}", flush=True)
            print(f"err {rank} {i}", file=sys.stderr, flush=True)
        """
    )
    start(module, tmp_path)
    start(module, tmp_path)  # a second run adds to the first one's lines
    lines = [f"{s} 1 {i}\n" for i in range(3) for s in ("out", "err")]
    assert log(tmp_path, 1) == "".join(lines) * 2
    assert "out 0 0" in log(tmp_path, 0)


def test_workers_can_talk_to_each_other(worker, tmp_path):
    module = worker(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        mark("sum", str(total.item()))
        dist.destroy_process_group()
        """
    )
    start(module, tmp_path)
    assert [(tmp_path / f"sum.{r}").read_text() for r in range(2)] == ["3.0", "3.0"]


def test_the_error_of_the_worker_that_died_comes_first_and_soon(worker, tmp_path):
    module = worker(
        """
        def body():
            mark("up")
            until(folder / f"up.{1 - rank}")
            if rank == 1:
                raise ValueError("the true cause")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one stuck in a collective
            time.sleep(600)
        guarded(body)
        """
    )
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        start(module, tmp_path)
    assert time.monotonic() - began < 30
    (problem,) = caught.value.problems
    assert problem.problem.startswith("rank 1: ValueError: the true cause")
    assert "trivial.py" in problem.problem  # the end of its traceback
    assert problem.where == str(tmp_path / "logs" / "rank_0001.log")
    assert "the true cause" in log(tmp_path, 1)
    assert caught.value.exit_status == 1


def test_a_worker_that_cannot_end_after_its_error_holds_nobody_up(worker, tmp_path):
    """A thread that never ends keeps the interpreter alive, as a stuck collective's does."""
    module = worker(
        """
        import threading
        def body():
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise RunError("the true cause")
        guarded(body)
        """
    )
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        start(module, tmp_path, npus=1)
    assert time.monotonic() - began < 40
    assert caught.value.problems == [Problem("rank 0: the true cause")]


def test_a_workers_own_words_are_kept(worker, tmp_path):
    module = worker(
        """
        def body():
            raise RunError("the loss became nan", "step 3", "lower it")
        guarded(body)
        """
    )
    with pytest.raises(RunError) as caught:
        start(module, tmp_path, npus=1)
    assert caught.value.problems == [Problem("rank 0: the loss became nan", "step 3", "lower it")]


def test_a_killed_worker_is_the_cause_though_others_complain_first(worker, tmp_path):
    module = worker(
        """
        def body():
            mark("up")
            until(folder / f"up.{1 - rank}")
            if rank == 1:
                print("about to be killed", flush=True)
                mark("gone")
                os.kill(os.getpid(), signal.SIGKILL)
            until(folder / "gone.1")
            raise ConnectionError("peer closed the connection")
        guarded(body)
        """
    )
    with pytest.raises(RunError) as caught:
        start(module, tmp_path)
    first, second = caught.value.problems
    assert first.problem == "rank 1 was killed by SIGKILL; its last lines:\nabout to be killed"
    assert "memory" in first.hint
    assert second.problem == "after it, rank 0 failed too"


def test_a_worker_that_says_nothing_is_described_by_its_log(worker, tmp_path):
    module = worker("print('odd', flush=True)\nos._exit(7)")
    with pytest.raises(RunError) as caught:
        start(module, tmp_path, npus=1)
    assert caught.value.problems[0].problem == "rank 0 ended with status 7; its last lines:\nodd"


SAVER = """
class Stop:
    asked = False

def asked(*_):
    Stop.asked = True
    mark("asked")

watch_parent()
signal.signal(signal.SIGTERM, asked)
signal.signal(signal.SIGINT, asked)
mark("up", str(os.getpid()))
while not Stop.asked:
    time.sleep(0.02)
"""


class SignalWhenUp:
    """A watcher that signals this process once all workers are up."""

    def __init__(self, folder: Path, *signals: tuple[str, signal.Signals]):
        self.folder, self.signals, self.notes = folder, signals, []
        self.thread = threading.Thread(target=self.run)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.thread.join()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def run(self) -> None:
        for name, number in self.signals:
            end = time.monotonic() + 60
            while len(list(self.folder.glob(f"{name}.[0-9]"))) < 2 and time.monotonic() < end:
                time.sleep(0.02)
            os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_lets_the_workers_save(worker, tmp_path, number):
    module = worker(SAVER + "time.sleep(0.5)\nmark('saved')\n")
    watcher = SignalWhenUp(tmp_path, ("up", number))
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught:
        start(module, tmp_path, watcher=watcher)
    assert sorted(p.name for p in tmp_path.glob("saved.*")) == ["saved.0", "saved.1"]
    assert "the workers have saved" in str(caught.value)
    assert caught.value.exit_status == 130
    assert "save and exit" in watcher.notes[0]
    assert signal.getsignal(number) is before


def test_a_second_stop_kills(worker, tmp_path):
    module = worker(SAVER + "time.sleep(600)\nmark('saved')\n")
    watcher = SignalWhenUp(tmp_path, ("up", signal.SIGINT), ("asked", signal.SIGINT))
    began = time.monotonic()
    with pytest.raises(Interrupted, match="killed"):
        start(module, tmp_path, watcher=watcher)
    assert time.monotonic() - began < 60
    assert not list(tmp_path.glob("saved.*"))
    assert watcher.notes[1] == "killing the workers"


def test_workers_that_take_too_long_to_save_are_killed(worker, tmp_path):
    module = worker(SAVER + "time.sleep(600)\n")
    with pytest.raises(Interrupted, match="killed"):
        start(module, tmp_path, watcher=SignalWhenUp(tmp_path, ("up", signal.SIGTERM)),
              stop_timeout=1)  # fmt: skip


def test_a_failure_while_saving_is_a_failure(worker, tmp_path):
    module = worker(
        SAVER
        + textwrap.dedent(
            """
            def body():
                raise RunError("disk full")
            guarded(body)
            """
        )
    )
    with pytest.raises(RunError, match="disk full"):
        start(module, tmp_path, watcher=SignalWhenUp(tmp_path, ("up", signal.SIGTERM)))


LAUNCHER = """
import sys
from pathlib import Path
from msllm.config import LaunchConfig
from msllm.engine.launch import launch
from msllm.errors import MsllmError
folder, options = Path(sys.argv[1]), eval(sys.argv[2])
try:
    launch("trivial", [str(folder)], LaunchConfig(**options), folder / "logs")
except MsllmError as error:
    print(error, flush=True)
    sys.exit(error.exit_status)
"""


def spawn(folder: Path, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), repr(options)],
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_workers_end_with_a_launcher_that_was_killed(worker, tmp_path):
    worker(SAVER)
    launcher = spawn(tmp_path, npus=2)
    wait_for(lambda: len(list(tmp_path.glob("up.[0-9]"))) == 2)
    pids = [int((tmp_path / f"up.{r}").read_text()) for r in range(2)]
    launcher.kill()
    launcher.communicate()

    def ended(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_for(lambda: all(ended(pid) for pid in pids), 10)


def two_machines(tmp_path, port, **options):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    both = {"nodes": 2, "npus": 1, "rdzv_endpoint": f"127.0.0.1:{port}", **options}
    return folders, [spawn(f, node_rank=r, **both) for r, f in enumerate(folders)]


@pytest.fixture
def port():
    return int(launching._local(placement({}, LaunchConfig())).endpoint.split(":")[1])


def test_two_machines_form_one_job(worker, tmp_path, port):
    worker(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        mark("sum", f"{total.item()} {os.environ['LOCAL_RANK']} {os.environ['WORLD_SIZE']}")
        dist.destroy_process_group()
        """
    )
    folders, launchers = two_machines(tmp_path, port)
    assert [p.communicate(timeout=900)[0] for p in launchers] == ["", ""]
    assert [p.returncode for p in launchers] == [0, 0]
    assert [(f / f"sum.{r}").read_text() for r, f in enumerate(folders)] == ["3.0 0 2"] * 2
    assert (folders[1] / "logs" / "rank_0001.log").exists()


@pytest.mark.parametrize("bad", [0, 1])
def test_a_failure_on_one_machine_ends_the_other_with_its_words(worker, tmp_path, port, bad):
    worker(
        f"""
        def body():
            mark("up")
            until(folder.parent / ("b" if rank == 0 else "a") / f"up.{{1 - rank}}")
            if rank == {bad}:
                raise RunError("the true cause")
            time.sleep(600)
        guarded(body)
        """
    )
    _, launchers = two_machines(tmp_path, port)
    output = [p.communicate(timeout=900)[0] for p in launchers]
    assert [p.returncode for p in launchers] == [1, 1]
    assert output[bad].startswith(f"rank {bad}: the true cause")
    assert output[1 - bad].startswith(f"machine {bad}: rank {bad}: the true cause")


def test_a_stop_on_one_machine_is_a_stop_on_both(worker, tmp_path, port):
    worker(
        """
        import torch, torch.distributed as dist
        watch_parent()
        stop = torch.zeros(1)
        signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))
        dist.init_process_group("gloo")
        mark("up")
        while True:
            agreed = stop.clone()
            dist.all_reduce(agreed)
            if agreed.item():
                break
            time.sleep(0.02)
        dist.destroy_process_group()
        """
    )
    folders, launchers = two_machines(tmp_path, port)
    wait_for(lambda: all((f / f"up.{r}").exists() for r, f in enumerate(folders)))
    launchers[1].terminate()
    output = [p.communicate(timeout=900)[0] for p in launchers]
    assert [p.returncode for p in launchers] == [130, 130], output


def test_a_machine_that_waits_for_others_can_be_stopped(worker, tmp_path, port):
    worker("pass")
    (launcher, other) = two_machines(tmp_path, port)[1]
    other.kill()
    other.communicate()
    process = psutil.Process(launcher.pid)
    wait_for(lambda: any(c.laddr and c.laddr.port == port for c in process.net_connections()))
    launcher.terminate()
    output = launcher.communicate(timeout=900)[0]
    assert launcher.returncode == 130, output
    assert "before the workers began" in output


def test_machines_that_never_come_are_reported(worker, tmp_path, port):
    worker("pass")
    config = LaunchConfig(nodes=2, node_rank=0, rdzv_endpoint=f"127.0.0.1:{port}", rdzv_timeout=1)
    with pytest.raises(RunError, match="did not find each other"):
        launch("trivial", [str(tmp_path)], config, tmp_path / "logs")


def test_reporting_without_a_launcher_does_nothing(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report_error(ValueError("x"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "such" / "folder"))
    report_error(ValueError("x"))


def test_the_earlier_report_is_the_cause():
    early, late = Failure(1, 1, Path(), 5.0), Failure(0, 1, Path(), 6.0)
    killed = Failure(2, -9, Path())
    assert sorted([late, early, killed], key=lambda f: f.order) == [killed, early, late]
