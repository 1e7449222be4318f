"""A model's folder on this machine: the one that is named, or a download kept in the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msllm.engine.hub.download import Progress, download, find_repository

CACHE = Path("~/.cache/msllm/models")


def local_folder(
    name: str,
    source: str = "hf",
    progress: Callable[[Progress], None] = lambda _: None,
    cache: Path = CACHE,
) -> Path:
    """Give the folder of a model's published files; fetched once if it is not here yet.

    Args:
        name: A folder, a name in the catalog, or a repository's.
        source: The hub to fetch from.
        progress: Called now and then while it is fetched.
        cache: Where downloads are kept.

    Raises:
        InputError: There is no such folder nor model.
        RunError: The hub can't be reached, or what it gives is damaged.
        Interrupted: By the user.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    repository, _ = find_repository(name, source)
    kept = cache.expanduser() / source / repository.replace("/", "--")
    if not kept.is_dir():
        download(name, kept, source=source, progress=progress)
    return kept
