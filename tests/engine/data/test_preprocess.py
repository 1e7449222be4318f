from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import tokenizers

from msllm.engine.data.indexed import IndexedTokens, find_problem
from msllm.engine.data.preprocess import preprocess
from msllm.engine.data.summary import read_summary
from msllm.errors import InputError, RunError


def rows(corpus) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines()]


def stored(prefix) -> list[list[int]]:
    """Documents as megatron-core reads them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


def expected(texts, folder, eod=(0,)) -> list[list[int]]:
    """Documents as the `tokenizers` library encodes them, one at a time."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [[*tokenizer.encode(text, add_special_tokens=False).ids, *eod] for text in texts]


@pytest.fixture
def messy(corpus, tmp_path):
    """The corpus in several files and kinds, with empty and broken records in between."""
    folder = tmp_path / "in"
    folder.mkdir()
    lines = corpus.read_text("utf-8").splitlines()
    lines[10:10] = ["", '{"text": "  "}']
    lines[20:20] = ["{broken", '{"id": 3}']
    (folder / "a.jsonl").write_text("\n".join(lines), "utf-8")
    (folder / "b.txt").write_text("one text file", "utf-8")
    (folder / "c.json").write_text(json.dumps([{"text": t} for t in rows(corpus)[:50]]), "utf-8")
    return folder


def test_output_is_the_tokenizers_own_in_order_for_any_number_of_workers(
    corpus, messy, tokenizer_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("msllm.engine.data.formats.BLOCK_BYTES", 4096)
    reports = [
        preprocess([messy], tokenizer_folder, tmp_path / f"out{n}", workers=n) for n in (1, 3)
    ]
    texts = [*rows(corpus), "one text file", *rows(corpus)[:50]]
    want = expected(texts, tokenizer_folder)
    assert stored(reports[0].prefix) == want
    for ending in ("bin", "idx", "json"):
        one, three = (tmp_path / f"out{n}_text_document.{ending}" for n in (1, 3))
        assert one.read_bytes() == three.read_bytes()
    for report in reports:
        assert (report.documents, report.tokens) == (len(want), sum(map(len, want)))
        assert (report.empty, report.broken) == (2, 2)
        assert report.text_bytes == sum(len(text.encode()) for text in texts)
        assert report.read_bytes == report.total_bytes
        name = str(messy / "a.jsonl")
        assert [example.partition(": ")[0] for example in report.examples] == [
            f"{name}:{line}" for line in (11, 12, 21, 22)
        ]
        assert "no key `text`; keys there: id" in report.examples[3]
    summary = read_summary(tmp_path / "out1_text_document")
    assert summary is not None
    assert summary.largest_token == max(map(max, want))
    assert (summary.documents, summary.tokens, summary.eod) == (len(want), reports[0].tokens, 0)


def test_eod_is_left_out_on_request_and_large_vocabularies_take_four_bytes(
    corpus, tokenizer_folder, tmp_path
):
    big = tmp_path / "big"
    big.mkdir()
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<t{i}>" for i in range(65_000)])
    tokenizer.save(str(big / "tokenizer.json"))  # without any EOS
    with pytest.raises(InputError, match="no EOS token"):
        preprocess([corpus], big, tmp_path / "out", workers=1)
    report = preprocess([corpus], big, tmp_path / "x_text_document", workers=1, append_eod=False)
    assert report.prefix == str(tmp_path / "x_text_document")
    assert IndexedTokens(tmp_path / "x_text_document").dtype.itemsize == 4
    assert stored(report.prefix) == expected(rows(corpus), tokenizer_folder, eod=())


def test_a_broken_record_stops_the_run_if_asked(messy, tokenizer_folder, tmp_path):
    with pytest.raises(InputError, match=r"a\.jsonl:21: broken record: invalid JSON"):
        preprocess([messy], tokenizer_folder, tmp_path / "out", workers=1, on_error="fail")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_bad_input_is_refused_together_and_nothing_written(corpus, tmp_path):
    prefix = tmp_path / "out"
    for ending in ("bin", "idx"):
        (tmp_path / f"out_text_document.{ending}").write_text("finished")
    with pytest.raises(InputError) as caught:
        preprocess([tmp_path / "none.jsonl"], tmp_path / "tok", prefix, workers=1)
    assert [problem.problem for problem in caught.value.problems] == [
        "output is there already",
        "file not found",
        "tokenizer folder not found",
    ]
    assert (tmp_path / "out_text_document.bin").read_text() == "finished"


def test_finished_output_is_replaced_on_request_only(corpus, tokenizer_folder, tmp_path):
    def run(**more):
        return preprocess([corpus], tokenizer_folder, tmp_path / "out", workers=1, **more)

    run()
    before = (tmp_path / "out_text_document.bin").read_bytes()
    with pytest.raises(InputError, match=r"output is there already.*--overwrite"):
        run()
    run(overwrite=True, append_eod=False)
    assert (tmp_path / "out_text_document.bin").read_bytes() != before
    # A .bin alone is what a killed run leaves: no finished output.
    (tmp_path / "out_text_document.idx").unlink()
    run()
    assert (tmp_path / "out_text_document.bin").read_bytes() == before


def test_nothing_but_empty_and_broken_records_is_refused(tokenizer_folder, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"body": "x"}\n')
    with pytest.raises(InputError, match=r"1 empty and 1 broken records.*no key `text`"):
        preprocess([path], tokenizer_folder, tmp_path / "out", workers=1)
    assert list(tmp_path.iterdir()) == [path]


def test_output_that_cannot_be_written(corpus, tokenizer_folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file"):
        preprocess([corpus], tokenizer_folder, tmp_path / "file" / "out", workers=1)
    with pytest.raises(RunError, match="can't be written: No space left"):
        preprocess([corpus], tokenizer_folder, tmp_path / "out", workers=1, progress=full_disk)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def full_disk(report):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_killed_worker_ends_the_run_at_once(corpus, tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("msllm.engine.data.formats.BLOCK_BYTES", 2048)
    killed: list[float] = []

    def kill_one(report):
        if not killed:
            children = psutil.Process().children()  # beside workers, multiprocessing's own tracker
            worker = next(child for child in children if "spawn_main" in child.cmdline()[-2])
            killed.append(time.monotonic())
            worker.send_signal(signal.SIGKILL)
            worker.wait()

    path = tmp_path / "many.jsonl"
    path.write_bytes(corpus.read_bytes() * 20)
    with pytest.raises(RunError, match="a worker process died"):
        preprocess([path], tokenizer_folder, tmp_path / "out", workers=2, progress=kill_one)
    assert time.monotonic() - killed[0] < 30
    assert list(tmp_path.iterdir()) == [path]


SCRIPT = """
import sys
from pathlib import Path
from msllm.engine.data.preprocess import preprocess

def tell(report):
    print(report.documents, flush=True)

if __name__ == "__main__":
    paths = [Path(word) for word in sys.argv[1:]]
    preprocess([paths[0]], paths[1], paths[2], workers=2, progress=tell)
"""


def test_a_killed_run_leaves_no_processes_and_nothing_that_loads(
    corpus, tokenizer_folder, tmp_path
):
    path, script = tmp_path / "many.jsonl", tmp_path / "script.py"
    path.write_bytes(corpus.read_bytes() * 200)
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), str(path), str(tokenizer_folder), str(tmp_path / "out")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.kill()
    process.wait()
    process.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    assert find_problem(tmp_path / "out_text_document") is not None
    report = preprocess([corpus], tokenizer_folder, tmp_path / "out", workers=1)
    assert stored(report.prefix) == expected(rows(corpus), tokenizer_folder)
    assert not list(tmp_path.glob("*.tmp"))


def test_memory_does_not_grow_with_the_input(tokenizer_folder, tmp_path):
    """All processes together take no more for 230 MB of lines than for 30 MB."""
    peaks = []
    line = json.dumps({"text": "few words", "other": "x" * 100_000}) + "\n"
    for number, copies in enumerate((300, 2300)):
        path = tmp_path / f"in{number}.jsonl"
        with path.open("w") as stream:
            stream.writelines(line for _ in range(copies))
        sizes: list[int] = []

        def sample(report, sizes=sizes):
            processes = [psutil.Process(), *psutil.Process().children()]
            sizes.append(sum(process.memory_info().rss for process in processes))

        preprocess([path], tokenizer_folder, tmp_path / f"o{number}", workers=2, progress=sample)
        # The first blocks find everything loaded and the most blocks in flight.
        peaks.append(max(sizes[8:]) / 1e6)
    assert peaks[1] < peaks[0] + 50
