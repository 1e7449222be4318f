"""`msllm download` as a process, against a hub on this machine: whole, interrupted, refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from msllm.engine.hub import download as downloading
from msllm.engine.hub.huggingface import HuggingFace
from msllm.engine.hub.repository import RemoteFile, Repository
from msllm.engine.weights.published import PublishedWeights
from msllm.errors import InputError
from msllm.models.catalog import catalog
from tests.engine.hub.conftest import BIG, REPO, SHARDS, UNWANTED
from tests.engine.hub.hub_server import TOKEN, Fault, Repo

SOURCES = ("hf", "modelscope")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def wanted(files):
    return {name: data for name, data in files.items() if name not in UNWANTED}


def written(part: Path) -> int:
    """Bytes that are in the unfinished folder."""
    return sum(path.stat().st_size for path in part.rglob("*") if path.is_file())


def wait_until(condition, process) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("source", SOURCES)
def test_a_model_comes_whole_and_nothing_else(run, hub, files, tmp_path, source):
    out = tmp_path / "models" / "small"
    done = run(REPO, "--out", out, "--source", source)
    assert done.returncode == 0, done.stderr
    assert contents(out) == wanted(files)
    assert not out.with_name("small.part").exists()
    assert len(PublishedWeights(out).entries) == 3
    assert REPO in done.stdout
    assert done.stderr == ""
    assert hub.sent.keys() == wanted(files).keys()


RANGES = {
    "MODELSCOPE_DOWNLOAD_PARALLEL_THRESHOLD_MB": "5",
    "MODELSCOPE_DOWNLOAD_PARALLEL_WORKERS": "2",
    "MODELSCOPE_DOWNLOAD_PART_SIZE_MB": "10",
}
"""Has ModelScope's library fetch the large shard as ranges, two at a time."""


@pytest.mark.parametrize(
    ("source", "settings", "after", "enough"),
    [
        ("hf", {}, BIG - 1_000_000, 20_000_000),
        ("modelscope", {}, BIG - 1_000_000, 20_000_000),
        ("modelscope", RANGES, 8_000_000, 14_000_000),
    ],
)
def test_a_killed_download_goes_on_where_it_was(
    run, start, hub, files, tmp_path, source, settings, after, enough
):
    out, part = tmp_path / "small", tmp_path / "small.part"
    hub.faults[SHARDS[0]] = fault = Fault("hold", after=after)
    process = start(REPO, "--out", out, "--source", source, **settings)
    wait_until(lambda: part.exists() and written(part) > enough, process)
    process.kill()
    process.communicate()
    fault.release.set()
    assert not out.exists()
    with pytest.raises(InputError):
        PublishedWeights(part)
    there = written(part)
    hub.faults.clear()
    hub.sent.clear()
    done = run(REPO, "--out", out, "--source", source, "--format", "json", **settings)
    assert done.returncode == 0, done.stderr
    assert contents(out) == wanted(files)
    assert sum(hub.sent.values()) < sum(map(len, wanted(files).values())) - there + 10_000
    assert "config.json" not in hub.sent
    assert json.loads(done.stdout)["received"] == sum(hub.sent.values())


@pytest.mark.parametrize("source", SOURCES)
def test_ctrl_c_keeps_what_has_come(run, start, hub, files, tmp_path, source):
    out, part = tmp_path / "small", tmp_path / "small.part"
    hub.faults[SHARDS[0]] = fault = Fault("hold", after=BIG - 1_000_000)
    process = start(REPO, "--out", out, "--source", source)
    wait_until(lambda: part.exists() and written(part) > 20_000_000, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=900)
    fault.release.set()
    assert process.returncode == 130
    assert err.startswith("stopped:\n  - the download was stopped")
    assert written(part) > 20_000_000
    hub.faults.clear()
    assert run(REPO, "--out", out, "--source", source).returncode == 0
    assert contents(out) == wanted(files)


@pytest.mark.parametrize("kind", ["cut", "reset"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_cut_transfer_is_taken_up_within_one_run(run, hub, files, tmp_path, source, kind):
    hub.faults[SHARDS[0]] = Fault(kind, after=15_000_000)
    done = run(REPO, "--out", tmp_path / "small", "--source", source)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "small") == wanted(files)


@pytest.mark.parametrize("source", SOURCES)
def test_damage_is_found(run, hub, files, tmp_path, source):
    out = tmp_path / "small"
    hub.faults[SHARDS[1]] = Fault("damage")
    done = run(REPO, "--out", out, "--source", source)
    assert done.returncode == 1
    assert SHARDS[1] in done.stderr
    assert "arrived damaged" in done.stderr
    assert "run the same command again" in done.stderr
    assert not out.exists()
    hub.faults.clear()
    assert run(REPO, "--out", out, "--source", source).returncode == 0
    assert contents(out) == wanted(files)


def test_a_network_that_breaks_says_how_to_go_on(run, hub, files, tmp_path):
    hub.faults[SHARDS[0]] = Fault("cut", after=0)
    done = run(REPO, "--out", tmp_path / "small")
    assert done.returncode == 1
    assert "run the same command again" in done.stderr
    assert "defect" not in done.stderr
    hub.faults.clear()
    hub.sent.clear()
    assert run(REPO, "--out", tmp_path / "small").returncode == 0
    assert hub.sent.keys() == {SHARDS[0]}


def test_another_hub_goes_on_with_what_one_has_given(run, hub, files, tmp_path):
    out = tmp_path / "small"
    hub.faults[SHARDS[0]] = Fault("damage")
    assert run(REPO, "--out", out, "--source", "modelscope").returncode == 1
    hub.faults.clear()
    hub.sent.clear()
    assert run(REPO, "--out", out).returncode == 0
    assert contents(out) == wanted(files)
    assert hub.sent.keys() == {SHARDS[0]}


@pytest.mark.parametrize("source", SOURCES)
def test_without_weights(run, hub, files, tmp_path, source):
    done = run(REPO, "--out", tmp_path / "tok", "--no-weights", "--source", source)
    assert done.returncode == 0, done.stderr
    small = {n: d for n, d in wanted(files).items() if "safetensors" not in n}
    assert contents(tmp_path / "tok") == small


def test_a_moved_branch_is_not_mixed_up(run, start, hub, files, tmp_path):
    out, part = tmp_path / "small", tmp_path / "small.part"
    hub.faults[SHARDS[0]] = fault = Fault("hold", after=BIG - 1_000_000)
    process = start(REPO, "--out", out)
    wait_until(lambda: part.exists() and written(part) > 20_000_000, process)
    process.kill()
    process.communicate()
    fault.release.set()
    hub.faults.clear()
    repo = hub.repos[REPO]
    repo.commit = "b" * 40
    changed = bytearray(repo.files[SHARDS[0]])
    changed[1000] ^= 1
    repo.files[SHARDS[0]] = bytes(changed)
    del repo.files["merges.txt"]
    done = run(REPO, "--out", out)
    assert done.returncode == 0, done.stderr
    assert contents(out) == wanted(repo.files)


@pytest.mark.parametrize("source", SOURCES)
def test_gated_repositories(run, hub, files, tmp_path, source):
    hub.repos[REPO].gated = True
    done = run(REPO, "--out", tmp_path / "small", "--source", source)
    assert done.returncode == 2, done.stderr
    assert "licence" in done.stderr
    assert ("HF_TOKEN" if source == "hf" else "MODELSCOPE_API_TOKEN") in done.stderr
    assert list(tmp_path.glob("small*")) == []
    if source == "hf":
        assert run(REPO, "--out", tmp_path / "small", HF_TOKEN=TOKEN).returncode == 0


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["someone/Other"], "there is no repository someone/Other"),
        ([REPO, "--revision", "v9"], "revision 'v9'"),
    ],
)
def test_what_is_not_there(run, hub, tmp_path, source, arguments, said):
    done = run(*arguments, "--out", tmp_path / "small", "--source", source)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert list(tmp_path.glob("small*")) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [("qwen3-8x", "qwen3-8b"), ("some one/x", "ORG/MODEL"), ("a/b/c", "ORG/MODEL")],
)
def test_names_that_can_be_no_models(name, said, tmp_path):
    with pytest.raises(InputError, match=said):
        downloading.download(name, tmp_path / "small")


def test_another_revision(run, hub, files, tmp_path):
    done = run(REPO, "--out", tmp_path / "small", "--revision", "v1", "--no-weights")
    assert done.returncode == 0
    assert "a" * 40 in done.stdout
    assert any("/revision/v1?" in request for request in hub.requests)


@pytest.mark.parametrize("source", SOURCES)
def test_no_network(run, hub, tmp_path, source):
    closed = {"HF_ENDPOINT": "http://127.0.0.1:9", "MODELSCOPE_ENDPOINT": "http://127.0.0.1:9"}
    done = run(
        REPO,
        "--out",
        tmp_path / "small",
        "--source",
        source,
        MODELSCOPE_API_MAX_RETRIES="1",
        **closed,
    )
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert "the download failed" in done.stderr
    assert "defect" not in done.stderr
    assert list(tmp_path.glob("small*")) == []


def test_offline_by_wish(run, tmp_path):
    done = run(REPO, "--out", tmp_path / "small", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "unset HF_HUB_OFFLINE" in done.stderr


def test_folders_that_are_taken(run, start, hub, files, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    shutil.copytree(tmp_path / "full", tmp_path / "mine.part")
    for out, said in (("full", "not empty"), ("mine", "is no unfinished download")):
        done = run(REPO, "--out", tmp_path / out)
        assert done.returncode == 2
        assert said in done.stderr
    assert (tmp_path / "full" / "thesis.txt").exists()
    assert (tmp_path / "mine.part" / "thesis.txt").exists()
    (tmp_path / "empty").mkdir()
    assert run(REPO, "--out", tmp_path / "empty", "--no-weights").returncode == 0
    assert "config.json" in contents(tmp_path / "empty")


def test_two_downloads_to_one_folder(run, start, hub, files, tmp_path):
    out, part = tmp_path / "small", tmp_path / "small.part"
    hub.repos["someone/Else"] = hub.repos[REPO]
    hub.faults[SHARDS[0]] = fault = Fault("hold", after=1000)
    process = start(REPO, "--out", out)
    wait_until(lambda: (part / SHARDS[1]).exists(), process)
    done = run(REPO, "--out", out)
    assert done.returncode == 2
    assert "another download" in done.stderr
    process.kill()
    process.communicate()
    fault.release.set()
    done = run("someone/Else", "--out", out)
    assert done.returncode == 2
    assert f"unfinished download of {REPO}" in done.stderr
    assert (part / SHARDS[1]).exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config.json": None}, "no config.json"),
        ({"model.safetensors.index.json": None, "pytorch_model.bin.index.json": None},
         "no weights that msllm reads"),
        ({SHARDS[0]: None}, f"{SHARDS[0]} is in the index but not there"),
        ({"model.safetensors.index.json": b"[]"}, "can't be read"),
        (
            {
                "model.safetensors.index.json": b'{"weight_map": {"w": "../../up"}}',
                "../../up": b"somewhere else",
            },
            "../../up is in the index but not there",
        ),
    ],
)  # fmt: skip
def test_repositories_that_are_no_models(run, hub, tmp_path, change, said):
    repo = hub.repos[REPO]
    repo.files = {
        n: change.get(n, d) for n, d in repo.files.items() if change.get(n, d) is not None
    }
    done = run(REPO, "--out", tmp_path / "small")
    assert done.returncode == 2
    assert said in done.stderr
    assert list(tmp_path.glob("small*")) == []


def test_weights_that_disagree_with_their_index(run, hub, tmp_path):
    index = json.loads(hub.repos[REPO].files["model.safetensors.index.json"])
    index["weight_map"]["ghost"] = SHARDS[1]
    hub.repos[REPO].files["model.safetensors.index.json"] = json.dumps(index).encode()
    done = run(REPO, "--out", tmp_path / "small")
    assert done.returncode == 1
    assert f"ghost is not in {SHARDS[1]}" in done.stderr
    assert not (tmp_path / "small").exists()


def test_pickles_and_own_code_are_told_of(run, hub, files, tmp_path):
    hub.repos["old/Model"] = Repo(
        {
            "config.json": b'{"auto_map": {"AutoModel": "modeling.M"}}',
            "modeling.py": b"raise SystemExit",
            "vocab.txt": b"a\nb\n",
            "pytorch_model.bin": b"weights",
            "tf_model.h5": b"other weights",
        }
    )
    done = run("old/Model", "--out", tmp_path / "old")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "old").keys() == {"config.json", "vocab.txt", "pytorch_model.bin"}
    assert "auto_map" in done.stderr
    assert "pickles" in done.stderr


def test_a_full_disk_is_seen_before(hub, environment, tmp_path, monkeypatch):
    for name in ("HF_HOME", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.url)
    free = SimpleNamespace(free=downloading.SPARE + BIG - 1)
    monkeypatch.setattr(downloading.shutil, "disk_usage", lambda _: free)
    with pytest.raises(InputError, match="still to come"):
        downloading.download(REPO, tmp_path / "small")
    assert not any(name in hub.sent for name in SHARDS)
    assert list(tmp_path.glob("small*")) == []
    free.free += 1_000_000
    downloading.download(REPO, tmp_path / "small")


def test_files_that_plain_http_does_not_give(tmp_path):
    file = RemoteFile(SHARDS[0], 60_000_000_000, "c" * 64)
    repository = Repository(REPO, "hf", "main", {file.name: file})
    with pytest.raises(InputError, match="over Xet only"):
        HuggingFace().fetch(repository, [file], tmp_path, lambda _: None)


def test_names_of_the_catalog_find_their_repositories():
    for card in catalog().models:
        for source, found in (
            ("hf", card.repositories.huggingface),
            ("modelscope", card.repositories.modelscope),
        ):
            if found:
                assert downloading.find_repository(card.name, source)[0] == found
            else:
                with pytest.raises(InputError, match="no repository"):
                    downloading.find_repository(card.name, source)


def test_git_agrees_on_the_digest_of_a_blob(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes("{é}\r\n".encode() * 100_000)
    size = path.stat().st_size
    told = subprocess.run(
        ["git", "hash-object", "--no-filters", path], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert RemoteFile("config.json", size, told, blob=True).is_in(path)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert not RemoteFile("config.json", size, told, blob=True).is_in(path)
