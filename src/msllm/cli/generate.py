"""`msllm generate`: continue a prompt with a run's newest checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

EPILOG = 'Example: msllm generate --model runs/tiny-qwen3-1 --prompt "def " --max-tokens 64'


def generate(
    model: Annotated[Path, typer.Option(help="folder of a run")],
    prompt: Annotated[str, typer.Option(help="text to continue")],
    max_tokens: Annotated[int, typer.Option(min=1, help="most tokens to add")] = 64,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer folder; the run's own when not given")
    ] = None,
) -> None:
    """Continue a prompt with a run's newest checkpoint, by greedy decoding."""
    # Megatron-core and torch warn of what is missing on NVIDIA stacks: nothing to act on here.
    warnings.filterwarnings("ignore")
    from msllm.engine.generation.greedy import continue_text

    print(continue_text(model, prompt, max_tokens, tokenizer))
