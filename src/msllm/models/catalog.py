"""The catalog: models by name, with their configs, repositories and recipes.

Facts are in `catalog/*.yaml`, one file a family. Configs there hold the essential fields of a
published `config.json`; they were put together from public knowledge and checked against training
scripts, not downloaded, and a model's notes say what is in doubt ("the script" there is the one the
recipe is from). The classes are plain, and
pydantic checks files against them (`load`): our own files in the tests, so that listing models
need not import it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from msllm.errors import InputError, closest
from msllm.models import counts, hf_config, plain_yaml, support
from msllm.models.architecture import Architecture

_STRICT = {"extra": "forbid"}
"""Has pydantic refuse keys that a class does not have."""

Backend = Literal["mcore", "legacy", "fsdp2"]
Category = Literal["dense", "moe", "linear", "ssm"]

CATEGORIES = ("dense", "moe", "linear", "ssm")
BACKENDS = ("mcore", "fsdp2")


def _check_sizes(recipe: Recipe | TuneRecipe) -> None:
    """Refuse sizes below 1; all whole numbers of a recipe but `warmup_steps` are sizes."""
    for key, value in vars(recipe).items():
        if type(value) is int and value < 1 and key != "warmup_steps":
            raise ValueError(f"{key} is {value}, but must be positive")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published way to pretrain a model.

    `nodes` x `npus` is the recommended cluster. Where the script behind the recipe is for another
    cluster or length, `script_nodes`, `script_npus` and `script_seq_length` say which, and the
    parallel sizes belong to those. `legacy` was its publisher's backend; msllm trains such models
    on its Mcore backend. `certification` is the publisher's too: `pass` was tested on hardware,
    `test` was still being tested.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    seq_length: int
    backend: Backend
    nodes: int
    npus: int
    certification: Literal["pass", "test"] | None = None
    supported_version: str | None = None
    script: str | None = None
    script_nodes: int | None = None
    script_npus: int | None = None
    script_seq_length: int | None = None
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    cp_algorithm: Literal["ring", "ulysses", "hybrid", "allgather"] | None = None
    fsdp: int | None = None
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_layers: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    steps: int | None = None
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    lr: float | None = None
    min_lr: float | None = None
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] | None = None
    warmup_steps: int | None = None
    warmup_fraction: float | None = None
    weight_decay: float | None = None
    clip_grad: float | None = None
    beta1: float | None = None
    beta2: float | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)

    @property
    def trained_on(self) -> str:
        """The backend of msllm that trains it."""
        return "mcore" if self.backend == "legacy" else self.backend

    @property
    def cluster(self) -> tuple[int, int]:
        """Nodes and NPUs a node that the parallel sizes are for."""
        return self.script_nodes or self.nodes, self.script_npus or self.npus


@dataclass(frozen=True, kw_only=True)
class TuneRecipe:
    """A published way to tune a model, compactly."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    task: Literal["sft", "dpo", "reward"]
    method: Literal["full", "lora", "qlora"]
    lora_rank: int | None = None
    lora_alpha: float | None = None
    seq_length: int | None = None
    nodes: int | None = None
    npus: int | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    micro_batch: int | None = None
    global_batch: int | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)


@dataclass(frozen=True, kw_only=True)
class Repositories:
    """Where a model is published. A guessed ModelScope id was formed by name, or is a near kin."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    huggingface: str | None = None
    modelscope: str | None = None
    modelscope_guessed: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """One model: what it is, where it is published, and its recipes.

    `config` is None for a model whose shape is not known.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    name: str
    family: str
    category: Category
    aliases: tuple[str, ...] = ()
    repositories: Repositories = field(default_factory=Repositories)
    config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    tune: tuple[TuneRecipe, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names the model answers to."""
        hub = (self.repositories.huggingface, self.repositories.modelscope)
        return tuple(dict.fromkeys((self.name, *self.aliases, *(id for id in hub if id))))

    @cached_property
    def known_architecture(self) -> Architecture | None:
        """The model's shape, or None where it is not known."""
        return None if self.config is None else hf_config.architecture_from_config(self.config)

    @property
    def architecture(self) -> Architecture:
        """The model's shape.

        Raises:
            InputError: It is not known.
        """
        found = self.known_architecture
        if found is None:
            raise InputError(
                f"the shape of {self.name} is not published",
                hint="give a folder with its config.json instead",
            )
        return found

    @cached_property
    def count(self) -> counts.ParameterCount | None:
        """The model's parameters, or None where its shape is not known."""
        arch = self.known_architecture
        return None if arch is None else counts.parameters(arch)

    @property
    def support(self) -> str:
        """What msllm itself supports of it, one of `support.LEVELS`."""
        return support.support(self.known_architecture)


@dataclass(frozen=True)
class Catalog:
    """Models, found by any of their names, whatever the case."""

    models: tuple[ModelCard, ...]

    @cached_property
    def _by_name(self) -> dict[str, ModelCard]:
        found: dict[str, ModelCard] = {}
        for card in self.models:
            for name in card.names:
                found.setdefault(name.lower(), card)
        return found

    @property
    def families(self) -> tuple[str, ...]:
        """The families, each once, in the catalog's order."""
        return tuple(dict.fromkeys(card.family for card in self.models))

    def find(self, name: str) -> ModelCard | None:
        """The model with this name or alias, if there is one."""
        return self._by_name.get(name.lower())

    def get(self, name: str) -> ModelCard:
        """The model with this name or alias.

        Raises:
            InputError: There is none; the hint has the three closest.
        """
        card = self.find(name)
        if card is None:
            raise InputError(
                f"unknown model {name!r}",
                hint=f"closest are {', '.join(self.suggest(name))}; "
                "msllm list-models shows all, and a folder with a config.json works too",
            )
        return card

    def suggest(self, name: str, n: int = 3) -> list[str]:
        """The `n` models whose name, or one of whose aliases, is most like `name`."""
        near = closest(name, list(self._by_name), n=4 * n)
        return list(dict.fromkeys(self._by_name[found].name for found in near))[:n]


FOLDER = Path(__file__).parent / "catalog"


@cache
def catalog() -> Catalog:
    """The catalog that comes with msllm."""
    with _without_collection():
        texts = [path.read_text(encoding="utf-8") for path in catalog_files()]
        return Catalog(tuple(_card(m) for text in texts for m in _models(plain_yaml.read(text))))


def catalog_files() -> list[Path]:
    """The files of the catalog that comes with msllm."""
    return sorted(FOLDER.glob("*.yaml"), key=lambda path: path.stem)


def load(paths: Iterable[Path]) -> Catalog:
    """Read and check catalog files.

    Raises:
        InputError: One that cannot be read, holds something unknown or wrong, or a name twice.
    """
    import yaml
    from pydantic import TypeAdapter, ValidationError

    cards: list[ModelCard] = []
    for path in paths:
        try:
            models = _models(yaml.safe_load(path.read_text(encoding="utf-8")))
            cards += TypeAdapter(list[ModelCard]).validate_python(models)
        except (yaml.YAMLError, KeyError, TypeError, ValidationError) as error:
            raise InputError(f"not a valid catalog file: {error}", where=path.name) from error
    seen: dict[str, str] = {}
    for card in cards:
        for name in card.names:
            owner = seen.setdefault(name.lower(), card.name)
            if owner != card.name:
                raise InputError(f"{name!r} is a name of both {owner} and {card.name}", "catalog")
    return Catalog(tuple(cards))


def _models(content: dict[str, Any]) -> list[dict[str, Any]]:
    """A file's models, each with the file's family."""
    return [{"family": content["family"], **model} for model in content["models"]]


def _card(model: dict[str, Any]) -> ModelCard:
    """A model of a file that is known to be right."""
    parts: dict[str, Any] = {key: tuple(model.get(key, ())) for key in ("aliases", "notes")}
    parts["repositories"] = Repositories(**model.get("repositories", {}))
    parts["recipes"] = tuple(Recipe(**recipe) for recipe in model.get("recipes", ()))
    parts["tune"] = tuple(TuneRecipe(**recipe) for recipe in model.get("tune", ()))
    return ModelCard(**{**model, **parts})


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep the garbage collector from walking thousands of new objects that all stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
