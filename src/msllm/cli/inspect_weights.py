"""`msllm convert inspect`: what a folder of weights is and holds."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from msllm.cli.list_models import aligned, choice, short
from msllm.cli.render import size

if TYPE_CHECKING:
    from msllm.engine.weights.contents import Contents, Listed

EPILOG = """Examples:

  msllm convert inspect Qwen3-8B

  msllm convert inspect RUN --format json
"""
FORMATS = ("table", "json")
SHOWN = 20


def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="weights, a checkpoint, or a run's folder")
    ],
    everything: Annotated[bool, typer.Option("--all", help="list all tensors")] = False,
    format: Annotated[str, typer.Option(help="table or json", metavar="NAME")] = "table",
) -> None:
    """Show what a folder of weights is and which tensors it has."""
    format = choice("--format", format, FORMATS) or "table"

    from msllm.engine.weights.contents import inspect as look

    contents = look(folder)
    for note in contents.folder.notes:
        print(f"warning: {note}", file=sys.stderr)
    if format == "json":
        sys.stdout.write(json.dumps(_record(contents), indent=2) + "\n")
        return
    tensors = contents.tensors + contents.optimizer
    shown = tensors if everything else tensors[:SHOWN]
    lines = [*_facts(contents), "", *_table(shown)]
    if len(shown) < len(tensors):
        lines.append(f"and {len(tensors) - len(shown):,} more (--all lists them)")
    sys.stdout.write("\n".join(lines) + "\n")


def _facts(contents: Contents) -> list[str]:
    from msllm.engine.weights.contents import by_dtype
    from msllm.models.counts import parameters

    found, arch = contents.folder, contents.architecture
    facts = {"folder": str(found.path), "format": found.kind.value}
    if arch is not None:
        count = parameters(arch)
        facts["family"] = arch.model_type
        facts["model"] = ", ".join(contents.names)
        facts["parameters"] = f"{count.total:,} ({short(count.total)})"
        if count.active != count.total:
            facts["active"] = f"{count.active:,} ({short(count.active)})"
    facts["tensors"] = f"{len(contents.tensors):,}, {size(contents.bytes)}"
    kinds = by_dtype(contents.tensors).items()
    facts["dtypes"] = ", ".join(f"{name} {size(number)}" for name, number in kinds)
    if contents.optimizer:
        state = sum(tensor.bytes for tensor in contents.optimizer)
        facts["optimizer"] = f"{len(contents.optimizer):,} tensors, {size(state)}"
    facts["step"] = "" if found.step is None else f"{found.step:,}"
    if contents.layout:
        facts["saved with"] = " ".join(f"{name} {n}" for name, n in contents.layout.items())
    return aligned([(name, fact) for name, fact in facts.items() if fact], gap=2)


def _table(tensors: tuple[Listed, ...]) -> list[str]:
    rows = [("tensor", "shape", "dtype", "size")]
    for tensor in tensors:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        rows.append((tensor.name, shape, tensor.dtype, size(tensor.bytes)))
    return aligned(rows, gap=2, right={3})


def _record(contents: Contents) -> dict[str, Any]:
    from msllm.engine.weights.contents import by_dtype
    from msllm.models.counts import parameters

    found, arch = contents.folder, contents.architecture
    count = None if arch is None else parameters(arch)
    return {
        "folder": str(found.path),
        "format": found.kind.name.lower(),
        "family": arch and arch.model_type,
        "models": list(contents.names),
        "parameters": count and count.total,
        "active_parameters": count and count.active,
        "step": found.step,
        "layout": contents.layout,
        "bytes": contents.bytes,
        "dtypes": by_dtype(contents.tensors),
        "tensors": [asdict(tensor) for tensor in contents.tensors],
        "optimizer": [asdict(tensor) for tensor in contents.optimizer],
    }
