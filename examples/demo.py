"""The main job of msllm, whole, on this machine's CPU: from text to a model that continues it.

Trains a tokenizer and a `tiny-qwen3` on the Python standard library's own source files with two
processes (tensor parallel), resumes the run once, draws its curves and lets it write on after
`def `. Only msllm's command line is used, so every step can be repeated by hand: each command is
printed before it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

MSLLM = Path(sys.executable).with_name("msllm")
MARK = ".msllm-demo"
CORPUS_BYTES = 10_000_000
SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib",
    "encodings", "pydoc_data",  # tables and manuals, not code
}  # fmt: skip
GOAL = 0.6
BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print a heading with the time since the start."""
    minutes, seconds = divmod(int(time.monotonic() - BEGAN), 60)
    print(f"\n[{minutes}:{seconds:02d}] {text}", flush=True)


def msllm(*arguments: str | Path) -> None:
    """Run one msllm command and show it; end the demo if it fails."""
    words = [str(a) for a in arguments]
    print(f"$ msllm {shlex.join(words)}", flush=True)
    status = subprocess.run([str(MSLLM), *words], check=False).returncode
    if status != 0:
        sys.exit(f"demo: msllm {words[0]} ended with status {status}")


def sources() -> Iterator[Path]:
    """List the standard library's Python files, in an order that is the same everywhere."""
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        yield from (Path(folder) / name for name in sorted(files) if name.endswith(".py"))


def write_corpus(path: Path) -> None:
    """Write source files as JSON lines with a `text`, up to CORPUS_BYTES."""
    size = number = 0
    with path.open("w", encoding="utf-8") as out:
        for source in sources():
            try:
                text = source.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if not text.strip():
                continue
            out.write(json.dumps({"text": text}) + "\n")
            size, number = size + len(text), number + 1
            if size >= CORPUS_BYTES:
                break
    print(f"{number} files, {size / 1e6:.1f} MB -> {path}")


def fresh_folder(folder: Path) -> None:
    """Make the demo's folder; an earlier demo's is replaced, anything else is left alone."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            sys.exit(f"demo: {folder} holds something else; choose another folder with --out")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def prefix_of(folder: Path) -> Path:
    """Find the prefix of the one indexed dataset in a folder."""
    (index,) = folder.glob("*.idx")
    return index.with_suffix("")


def losses(run: Path) -> list[float]:
    """Every step's loss, after checking that each step is there exactly once."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    if steps != list(range(1, len(steps) + 1)):
        sys.exit(f"demo: metrics.jsonl does not hold each step once: {steps}")
    return [line["loss"] for line in lines]


def train(run: Path, data: Path, tokenizer: Path, steps: int, last: int) -> None:
    """Train up to `steps`; what is in `run` already is continued."""
    msllm(
        "pretrain", "--model", "tiny-qwen3", "--data", data, "--tokenizer", tokenizer,
        "--out", run, "--device", "cpu", "--dtype", "fp32", "--npus", "2", "--tp", "2",
        "--seq-length", "128", "--micro-batch", "32", "--global-batch", "32", "--lr", "3e-3",
        "--steps", str(steps), "--save-interval", "20",
        "--set", f"train.decay_steps={last}", "--set", "train.warmup_steps=10",
        "--set", "train.min_lr=3e-4", "--set", "checkpoint.keep=2", "--set", "log.interval=10",
    )  # fmt: skip


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description="msllm's main job on this machine's CPU")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to work in")
    parser.add_argument("--steps", type=int, default=100, help="training steps in all")
    options = parser.parse_args()
    out, last = options.out, options.steps
    first = max(1, last * 6 // 10)
    corpus, tokenizer, data, run = (
        out / "corpus.jsonl", out / "tokenizer", out / "data", out / "run"
    )  # fmt: skip

    say("text: the Python standard library's own source files")
    fresh_folder(out)
    write_corpus(corpus)
    say("a tokenizer of 1,024 tokens: few, so that a hundred steps see each often enough")
    msllm("tokenizer", "train", "--data", corpus, "--vocab-size", "1024", "--out", tokenizer)
    say("tokenize")
    data.mkdir()
    msllm("preprocess", "--data", corpus, "--tokenizer", tokenizer, "--out", data / "stdlib",
          "--workers", "2")  # fmt: skip
    say(f"train {first} steps on 2 processes, tensor parallel")
    train(run, prefix_of(data), tokenizer, first, last)
    say(f"resume from the checkpoint and train to step {last}")
    train(run, prefix_of(data), tokenizer, last, last)
    say("curves")
    msllm("plot", run)
    say("what the model writes after `def ` (greedy)")
    msllm("generate", "--model", run, "--prompt", "def ", "--max-tokens", "48")
    report(losses(run), last, run)


def report(curve: list[float], last: int, run: Path) -> None:
    """Say whether the loss fell as far as it should; end with status 1 if not."""
    share = curve[-1] / curve[0]
    say(f"loss {curve[0]:.3f} -> {curve[-1]:.3f}: {share:.0%} of its first value; see {run}")
    if len(curve) != last:
        sys.exit(f"demo: {len(curve)} steps in metrics.jsonl instead of {last}")
    if not share < GOAL:
        sys.exit(f"demo: the loss should have fallen below {GOAL:.0%} of its first value")
    print("demo: done")


if __name__ == "__main__":
    main()
