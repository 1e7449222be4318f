"""Speed and memory of `msllm preprocess` beside the `tokenizers` library alone, on the same cores.

The text is this Python's own source files as JSON lines, the tokenizer is trained on it. The
library gets the texts in memory and only encodes them; msllm reads the file, parses, encodes, and
writes. Each measurement is a process of its own; rounds alternate, so that a busy machine is unfair
to none.

    python benchmarks/preprocess.py [--workers N] [--rounds N] [--vocab-size N]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path


def write_corpus(path: Path) -> None:
    library = Path(sysconfig.get_paths()["stdlib"])
    with path.open("w", encoding="utf-8") as stream:
        for file in sorted(library.rglob("*.py")):
            if "site-packages" not in file.parts:
                text = file.read_text("utf-8", errors="ignore")
                stream.write(json.dumps({"text": text}) + "\n")


def measure_library(path: Path, tokenizer: Path, workers: int, fast: bool) -> tuple[int, float]:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    encode = library.encode_batch_fast if fast else library.encode_batch
    texts = [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]
    started = time.perf_counter()
    tokens = 0
    for first in range(0, len(texts), 100):
        encodings = encode(texts[first : first + 100], add_special_tokens=False)
        tokens += sum(len(encoding.ids) for encoding in encodings)
    return tokens, time.perf_counter() - started


def measure_msllm(path: Path, tokenizer: Path, workers: int) -> tuple[int, float]:
    from msllm.engine.data.preprocess import preprocess

    started = time.perf_counter()
    report = preprocess([path], tokenizer, path.with_name("out"), workers=workers, overwrite=True)
    # The library is asked for no end-of-document tokens, so they are not counted here either.
    return report.tokens - report.documents, time.perf_counter() - started


def run_one(arguments: argparse.Namespace) -> None:
    """Measure in this process and print the figures for the one that started it."""
    path, tokenizer = arguments.folder / "corpus.jsonl", arguments.folder / "tok"
    if arguments.one == "msllm":
        tokens, seconds = measure_msllm(path, tokenizer, arguments.workers)
    else:
        fast = arguments.one == "encode_batch_fast"
        tokens, seconds = measure_library(path, tokenizer, arguments.workers, fast)
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    # Not ru_maxrss, which would start at the size of the process that started this one.
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert peak is not None
    figures = {
        "tokens": tokens,
        "seconds": seconds,
        "cpu": own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime,
        # ru_maxrss of children is the largest child's; all workers are taken to be as large.
        "peak": (int(peak[1]) + arguments.workers * children.ru_maxrss) / 1024,
    }
    print(json.dumps(figures))


def run_all(arguments: argparse.Namespace) -> None:
    from msllm.engine.data.train_tokenizer import train_tokenizer

    arguments.folder.mkdir(exist_ok=True)
    path = arguments.folder / "corpus.jsonl"
    write_corpus(path)
    train_tokenizer([path], arguments.vocab_size, arguments.folder / "tok")
    size = path.stat().st_size / 1e6
    print(f"{size:.0f} MB of JSON lines, {arguments.vocab_size:,} ids, {arguments.workers} workers")
    names = ("encode_batch", "encode_batch_fast", "msllm")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            words = [sys.executable, __file__, "--one", name, "--folder", str(arguments.folder)]
            words += ["--workers", str(arguments.workers)]
            output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            found[name].append(json.loads(output.splitlines()[-1]))
    print(f"{'':20}{'tokens/s':>12}{'of encode_batch':>17}{'CPU s':>8}{'peak MiB':>10}")
    speeds = {n: statistics.median(f["tokens"] / f["seconds"] for f in found[n]) for n in names}
    for name in names:
        cpu, peak = (statistics.median(f[key] for f in found[name]) for key in ("cpu", "peak"))
        share = speeds[name] / speeds["encode_batch"]
        print(f"{name:20}{speeds[name]:12,.0f}{share:17.2f}{cpu:8.1f}{peak:10.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run_one(given)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            given.folder = Path(temporary)
            run_all(given)
