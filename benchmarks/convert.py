"""Speed and memory of `msllm convert` beside `cp -r` of the same bytes, and transformers.

Two models are written with random bfloat16 weights: a dense one of 1.5 B parameters, and one of
64 experts a layer of similar size. Each measurement is a process of its own, written and synced to
disk; rounds alternate, so that a busy machine is unfair to none. Memory is the peak of what the
process itself holds (anonymous pages), and with mapped files, which the system may drop.

    python benchmarks/convert.py [--rounds N] [--folder DIR] [--scale S]
        [--without-transformers]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

DENSE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 65536,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model.save_pretrained(sys.argv[2])
"""


@dataclass(frozen=True)
class Measured:
    seconds: float
    own: int
    """Peak bytes of anonymous memory."""
    peak: int
    """Peak bytes with mapped files."""
    rate: float
    """MB/s that msllm itself tells: without the seconds of its start."""


def write_model(config: dict[str, object], folder: Path, layers: int) -> int:
    """Write random weights of a config, shard by shard; returns their bytes."""
    import torch

    from msllm.engine.weights import matching
    from msllm.engine.weights.published_writer import Planned, PublishedWriter
    from msllm.models.hf_config import architecture_from_config
    from msllm.models.weight_map import Run, published_shapes

    folder.mkdir()
    config = {**config, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    weights = matching.mapped(architecture_from_config(config))
    shapes = published_shapes(weights)
    planned = {name: Planned(shape, torch.bfloat16) for name, shape in shapes.items()}
    writer = PublishedWriter(folder, planned, 2 * 10**9)
    for name, tensor in planned.items():
        rows = torch.empty(tensor.shape, dtype=tensor.dtype).normal_(std=0.02)
        writer.write(Run(name, 0, len(rows)), rows)
    return sum(tensor.size for tensor in planned.values())


def measure(command: list[str]) -> Measured:
    """Run a command to its end, and until what it wrote is on the disk."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    own = peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        own = max(own, _field(status, "RssAnon"))
        peak = max(peak, _field(status, "VmHWM"))
        time.sleep(0.01)
    if process.wait():
        sys.exit(f"failed: {' '.join(command)}")
    said = re.search(r"\(([\d,]+) MB/s\)", process.stdout.read())
    subprocess.run(["sync"], check=True)
    rate = float(said[1].replace(",", "")) if said else 0.0
    return Measured(time.perf_counter() - started, own, peak, rate)


def _field(status: str, name: str) -> int:
    line = next((line for line in status.splitlines() if line.startswith(f"{name}:")), None)
    return int(line.split()[1]) * 1024 if line else 0


def commands(source: Path, out: Path, transformers: bool) -> dict[str, list[str]]:
    """What is measured, in order: an export needs the checkpoint before it."""
    msllm = [sys.executable, "-m", "msllm", "convert"]
    hf, mcore, back = str(source), str(out / "mcore"), str(out / "back")
    found = {
        "cp -r": ["cp", "-r", hf, str(out / "copy")],
        "hf-to-mcore": [*msllm, "hf-to-mcore", "--model", hf, "--out", mcore],
        "mcore-to-hf": [*msllm, "mcore-to-hf", "--checkpoint", mcore, "--out", back],
    }
    if transformers:
        saved = str(out / "transformers")
        found["transformers"] = [sys.executable, "-c", TRANSFORMERS, hf, saved]
    return found


def report(name: str, size: int, rounds: list[dict[str, Measured]]) -> None:
    print(f"{name}: {size / 1e9:.2f} GB, {len(rounds)} rounds")
    for what in rounds[0]:
        runs = [measured[what] for measured in rounds]
        ratios = [measured["cp -r"].seconds / measured[what].seconds for measured in rounds]
        print(
            f"  {what:14} {size / statistics.median(r.seconds for r in runs) / 1e6:7,.0f} MB/s  "
            f"{statistics.median(ratios):.2f} of cp ({min(ratios):.2f} to {max(ratios):.2f})  "
            f"own memory {max(r.own for r in runs) / 2**20:7,.0f} MiB  "
            f"with mapped files {max(r.peak for r in runs) / 2**20:7,.0f} MiB"
            + (
                f"  {statistics.median(r.rate for r in runs):,.0f} MB/s once started"
                * any(r.rate for r in runs)
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; needs five times the model")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the layers")
    parser.add_argument("--without-transformers", action="store_true")
    options = parser.parse_args()
    for name, config in (("dense", DENSE), ("experts", EXPERTS)):
        with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
            source, out = Path(temporary, "source"), Path(temporary, "out")
            layers = max(1, int(config["num_hidden_layers"] * options.scale))
            size = write_model(config, source, layers)
            rounds = []
            for _ in range(options.rounds):
                out.mkdir()
                found = commands(source, out, not options.without_transformers)
                rounds.append({what: measure(command) for what, command in found.items()})
                shutil.rmtree(out)
            report(name, size, rounds)


if __name__ == "__main__":
    main()
