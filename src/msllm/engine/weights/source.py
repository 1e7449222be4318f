"""A folder's weights as the model means them, whatever the form of its files.

Safetensors are preferred to pickles. Tensors that are published quantised, in several parts, are
one logical tensor of bfloat16 numbers here, made for the rows that are asked for. What the tensors
are called is left as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msllm.engine.weights import pickled, published, quantised
from msllm.engine.weights.partial import refuse_unfinished
from msllm.engine.weights.pickled import PickledWeights
from msllm.engine.weights.published import PublishedWeights
from msllm.engine.weights.quantised import Files, Form
from msllm.errors import InputError, Problem
from msllm.models.hf_config import read_config
from msllm.models.plain_file import unreadable
from msllm.models.weight_map import Run

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHOWN = 6
"""Problems of one kind that are told one by one."""


class Source:
    """The logical tensors of a folder.

    Attributes:
        tensors: Each one's shape and type, by its name.
        files: The files that hold them.

    Raises:
        InputError: A quantised tensor has no scales, or such that do not fit it.
    """

    def __init__(self, files: Files, settings: quantised.Settings):
        self._files = files
        self.files = sorted({entry.file for entry in files.entries.values()})
        problems = _unknown_types(files)
        self.tensors: dict[str, Form] = quantised.forms(files, settings, problems)
        if problems:
            raise InputError(shortened(problems, str(files.folder)))

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        import torch

        found: torch.dtype = getattr(torch, published.TORCH_NAMES[self.tensors[name].dtype])
        return found

    def tensor(self, name: str) -> Tensor:
        """A whole tensor; not to be written to."""
        shape = self.tensors[name].shape
        if len(shape) < 3:
            return self.rows(Run(name, 0, shape[0]))
        import torch

        parts = [self.rows(Run(name, 0, shape[1], expert=e)) for e in range(shape[0])]
        return torch.stack(parts)

    def rows(self, run: Run, columns: tuple[int, int] | None = None) -> Tensor:
        """A run's rows, all columns of them or `(first, count)`; not to be written to."""
        return self.tensors[run.tensor].rows(self._files, run, columns)


def _unknown_types(files: Files) -> list[Problem]:
    """List tensors of types that torch does not have."""
    return [
        Problem(f"{name} is stored as {entry.dtype}, which is not read", str(files.folder))
        for name, entry in files.entries.items()
        if entry.dtype not in published.TORCH_NAMES
    ]


def open_weights(folder: Path) -> Source:
    """Find a folder's weights; only headers are read.

    Raises:
        InputError: There are none, they are damaged, hold more than tensors, or are quantised in
            a way that is not read.
    """
    folder = folder.expanduser()
    refuse_unfinished(folder)
    try:
        return _open(folder)
    except PermissionError as error:  # the folder itself
        raise unreadable(folder, error) from error


def _open(folder: Path) -> Source:
    config = read_config(folder) if (folder / "config.json").exists() else {}
    settings = quantised.settings(config, str(folder / "config.json"))
    return Source(_files(folder), settings)


def _files(folder: Path) -> Files:
    for module, form in ((published, PublishedWeights), (pickled, PickledWeights)):
        if (folder / module.INDEX).exists() or (folder / module.SINGLE).exists():
            found: Files = form(folder)
            return found
    raise InputError(
        "there are no weights in the folder",
        str(folder),
        f"expected {published.SINGLE} or {pickled.SINGLE}, or shards with an index",
    )


def shortened(problems: list[Problem], where: str) -> list[Problem]:
    """The first few, and how many there are more."""
    more = len(problems) - SHOWN
    if more <= 0:
        return problems
    return [*problems[:SHOWN], Problem(f"and {more} more of that kind", where)]
