"""Greedy decoding in one process: what a model would write next.

Loads a run's newest checkpoint at one process, whatever layout trained it, and takes the likeliest
token again and again. No cache of keys and values: meant for a look at a run, not for serving.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msllm.config import RunConfig, read_run
from msllm.engine.training.checkpoint_folder import Checkpoint, open_checkpoint
from msllm.engine.training.run_folder import RunFolder
from msllm.errors import InputError

if TYPE_CHECKING:
    from msllm.engine.data.tokens import Tokenizer


def open_run(path: Path, tokenizer: Path | None = None) -> tuple[RunConfig, Checkpoint]:
    """Settings and newest checkpoint of a run's folder; with another tokenizer, if one is given.

    Raises:
        InputError: If it is no run, or has no complete checkpoint.
    """
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise InputError(
            f"`{path}` is not a run's folder: it has no run.yaml",
            "--model",
            "give the folder that `msllm pretrain --out` named",
        )
    run = read_run(folder.config)
    if tokenizer is not None:
        data = run.data.model_copy(update={"tokenizer": tokenizer})
        run = run.model_copy(update={"data": data})
    if run.data.tokenizer is None or not run.data.tokenizer.is_dir():
        raise InputError(
            f"there is no tokenizer in {run.data.tokenizer}"
            if run.data.tokenizer
            else "the run does not know its tokenizer",
            f"--tokenizer {tokenizer}" if tokenizer else str(folder.config),
            "give --tokenizer DIR",
        )
    return run, open_checkpoint(path, "--model")


def continue_text(path: Path, prompt: str, max_tokens: int, tokenizer: Path | None = None) -> str:
    """The prompt with up to `max_tokens` further tokens; ends early at the end of a document."""
    import torch

    from msllm.engine.data.tokens import Tokenizer
    from msllm.engine.device import select_device
    from msllm.engine.layout import Layout
    from msllm.engine.megatron.backend import MegatronBackend
    from msllm.models.resolve import resolve_model

    run, checkpoint = open_run(path, tokenizer)
    text = Tokenizer(run.data.tokenizer)  # type: ignore[arg-type]
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError("the prompt is not UTF-8", "--prompt") from None
    tokens, allowed = split_prompt(text, prompt)
    if not tokens:
        raise InputError("the prompt has no tokens", "--prompt", "write at least one character")
    train = run.train.model_copy(update={"optimizer": "adamw"})  # nothing is trained
    run = run.model_copy(update={"layout": type(run.layout)(), "train": train})
    with _alone():
        backend = MegatronBackend(
            resolve_model(run.model).architecture, Layout(), run, select_device(run.device)
        )
        backend.load_weights(checkpoint.path)
        for _ in range(max_tokens):
            window = torch.tensor([tokens[-run.data.seq_length :]])
            scores = backend.logits(window)[0, -1, : text.vocab_size]
            token = allowed[int(scores[allowed].argmax())] if allowed else int(scores.argmax())
            if token == text.eod_id:
                break
            tokens.append(token)
            allowed = []
        backend.close()
    return text.decode(tokens)


def split_prompt(tokenizer: Tokenizer, prompt: str) -> tuple[list[int], list[int]]:
    """Tokens of the prompt, and those that may come first (none: all).

    In training text the space before a word is part of the word's token, so a prompt that ends in
    a space on its own is one that the model has hardly seen. Such a space is left to the first
    token, which must then begin with it.
    """
    shorter = prompt[:-1]
    if not prompt.endswith(" ") or not shorter or shorter.endswith(" "):
        return tokenizer.encode_batch([prompt])[0], []
    ids = range(tokenizer.vocab_size)
    allowed = [i for i in ids if tokenizer.decode([i]).startswith(" ")]
    return tokenizer.encode_batch([shorter if allowed else prompt])[0], allowed


@contextmanager
def _alone() -> Iterator[None]:
    """Set the variables by which a process is a job of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    before = {name: os.environ.get(name) for name in alone}
    os.environ.update(alone)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
