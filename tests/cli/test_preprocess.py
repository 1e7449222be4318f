from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from msllm.cli import app, data_progress, progress
from msllm.engine.data.indexed import IndexedTokens
from msllm.engine.data.preprocess import Report
from msllm.engine.data.train_tokenizer import train_tokenizer


@pytest.fixture
def files(tmp_path):
    """Two data files, one with a broken and an empty line, and a tokenizer."""
    texts = [f"number {n} of the lines, {'abcdefghij' * (n % 7)}" for n in range(60)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{broken", ""]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    train_tokenizer([tmp_path / "b.jsonl"], 280, tmp_path / "tok")
    return tmp_path


def words(files: Path, *more: object) -> list[str]:
    data = ["--data", str(files / "a.jsonl"), str(files / "b.jsonl")]
    given = ["--tokenizer", files / "tok", "--out", files / "out", "--workers", 1, *more]
    return ["preprocess", *data, *map(str, given)]


def test_it_writes_and_sums_up(files, capsys):
    assert app.run(words(files)) == 0
    out, err = capsys.readouterr()
    tokens = IndexedTokens(files / "out_text_document")
    assert len(tokens) == 120
    assert "documents  120\n" in out
    assert f"tokens     {tokens.num_tokens:,} (" in out
    assert "empty      1\n" in out
    assert "broken     1\n" in out
    assert f"left out: {files / 'a.jsonl'}:61: invalid JSON" in err
    assert f"left out: {files / 'a.jsonl'}:62: empty" in err


def test_options_arrive(files, capsys):
    assert app.run(words(files, "--on-error", "fail")) == 2
    assert f"{files / 'a.jsonl'}:61" in capsys.readouterr().err
    assert not (files / "out_text_document.idx").exists()
    assert app.run(words(files, "--format", "json")) == 0
    with_eod = json.loads(capsys.readouterr().out)
    assert (with_eod["documents"], with_eod["broken"]) == (120, 1)
    assert app.run(words(files)) == 2
    assert "output is there already" in capsys.readouterr().err
    assert app.run(words(files, "--overwrite", "--no-eod", "--format", "json")) == 0
    without = json.loads(capsys.readouterr().out)
    assert with_eod["tokens"] - without["tokens"] == 120
    assert app.run(words(files, "--overwrite", "--text-key", "body")) == 2
    assert "no key `body`" in capsys.readouterr().err
    assert app.run(words(files, "--overwrite", "--task", "sft")) == 2
    assert "sft" in capsys.readouterr().err


def test_a_tokenizer_is_trained_and_used(files, capsys):
    made = ["--data", str(files / "b.jsonl"), "--vocab-size", "290", "--out", str(files / "new")]
    assert app.run(["tokenizer", "train", *made]) == 0
    assert "wrote a tokenizer of 290 ids" in capsys.readouterr().err
    assert app.run(["tokenizer", "train", *made]) == 2
    assert "output is there already" in capsys.readouterr().err
    assert app.run(words(files, "--tokenizer", files / "new")) == 0


def test_plain_lines_come_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    report = Report("p", 1000, documents=5, tokens=4000, text_bytes=8_000_000, read_bytes=250)
    with data_progress.show_progress() as show:
        for second in range(25):
            now[0], report.seconds = float(second), 2.0
            show(report)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["tokenizing   25%  5 documents  4.0 MB/s  2,000 tokens/s"] * 2


def test_a_terminal_gets_a_bar(files):
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "msllm", *words(files)],
        stderr=follower,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(follower)
    shown = b"".join(iter(lambda: read_terminal(leader), b"")).decode()
    os.close(leader)
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 0
    assert "tokens/s" in shown
    assert "tokens/s" in output


def read_terminal(leader: int) -> bytes:
    """What the terminal holds; nothing once the last process has let go of it."""
    try:
        return os.read(leader, 1 << 16)
    except OSError:
        return b""
