"""Training speed of the engine beside a plain transformers loop: same shape, batch and AdamW.

Both run in this process by turns, one process, float32, the same number of threads, and the ratio
is taken turn by turn, so that a drifting machine does not decide. Also prints the share of a step
that is spent outside forward, backward and optimizer.

    python benchmarks/training.py [--model tiny-qwen3] [--turns 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import time
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29533")
os.environ.update(RANK="0", WORLD_SIZE="1")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps a turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


class Transformers:
    """What one would write by hand: model, AdamW, clipping."""

    def __init__(self, model, args):
        import torch
        import transformers

        config = dict(model.config)
        kind = config.pop("model_type")
        config = transformers.AutoConfig.for_model(kind, **config)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, batch) -> float:
        import torch

        logits = self.model(batch["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), batch["labels"].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


class Engine:
    """msllm's backend."""

    def __init__(self, model, args):
        from msllm.config import RunConfig
        from msllm.engine.device import select_device
        from msllm.engine.layout import Layout
        from msllm.engine.megatron.backend import MegatronBackend

        run = RunConfig(
            model=args.model,
            device="cpu",
            dtype="fp32",
            data={"seq_length": args.seq_length},
            train={"steps": 10_000, "micro_batch": args.batch, "global_batch": args.batch},
        )
        self.backend = MegatronBackend(model.architecture, Layout(), run, select_device("cpu"))
        self.number = 0

    def step(self, batch) -> float:
        self.number += 1
        return self.backend.train_step([batch], self.number).loss


class Timed:
    """A backend that counts the seconds spent in its steps."""

    def __init__(self, backend):
        self.backend, self.seconds = backend, 0.0
        self.dp_rank, self.dp_size = backend.dp_rank, backend.dp_size

    def train_step(self, batches, step):
        began = time.perf_counter()
        result = self.backend.train_step(batches, step)
        self.seconds += time.perf_counter() - began
        return result

    def save(self, folder, background):
        (folder / "nothing").touch()


def share_outside(engine, model, args) -> float:
    """Share of a step that the loop adds to forward, backward and optimizer, over 20 steps."""
    import json
    import tempfile
    from pathlib import Path

    from msllm.engine.device import select_device
    from msllm.engine.layout import Layout
    from msllm.engine.training import loop
    from msllm.engine.training.run_folder import RunFolder

    run = engine.backend.run
    run = run.model_copy(
        update={
            "data": run.data.model_copy(update={"paths": ["mock"]}),
            "train": run.train.model_copy(update={"steps": 20}),
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        job = loop.Job(
            run,
            model.architecture,
            Layout(),
            select_device("cpu"),
            RunFolder(Path(folder)).create(),
        )
        timed = Timed(engine.backend)
        with contextlib.redirect_stdout(io.StringIO()):
            loop.train(job, timed, loop.StopSignal())
        lines = job.folder.metrics.read_text().splitlines()
        whole = sum(json.loads(line)["step_time_s"] for line in lines)
    return 1 - timed.seconds / whole


def main() -> None:
    args = arguments()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    from msllm.models.resolve import resolve_model

    torch.set_num_threads(args.threads)
    model = resolve_model(args.model)
    engine, plain = Engine(model, args), Transformers(model, args)
    vocab, shape = model.architecture.vocab_size, (args.batch, args.seq_length + 1)
    tokens = torch.randint(0, vocab, shape)
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(args.batch, args.seq_length),
        "position_ids": torch.arange(args.seq_length).repeat(args.batch, 1),
    }

    def speed(trainer) -> float:
        began = time.perf_counter()
        for _ in range(args.steps):
            trainer.step(batch)
        return args.steps * args.batch * args.seq_length / (time.perf_counter() - began)

    for trainer in (engine, plain):
        trainer.step(batch)
    ours, theirs = [], []
    for _ in range(args.turns):
        ours.append(speed(engine))
        theirs.append(speed(plain))
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"{args.model}, {args.batch} x {args.seq_length} tokens, {args.threads} threads")
    print(f"msllm         {statistics.median(ours):10,.0f} tokens/s")
    print(f"transformers  {statistics.median(theirs):10,.0f} tokens/s")
    print(f"ratio         {statistics.median(ratios):10.2f}  ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"outside       {share_outside(engine, model, args):10.2%}  of a step")
    engine.backend.close()


if __name__ == "__main__":
    main()
