"""Settings: from flags, `--set`, a file, the catalog's recipe and defaults to one RunConfig.

Each value keeps where it came from. Wrong keys and values are collected from all sources and shown
together. Whether the values fit together is checked later, by `msllm.engine.preflight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from msllm.cli.setting_names import PATHS, SECTIONS, suggestion
from msllm.config import RunConfig
from msllm.errors import InputError, MsllmError, Problem

DEFAULT = "default"
NO_MODEL = Problem("no model was named", "--model", "give --model NAME; see `msllm list-models`")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value.

    Attributes:
        value: As it was written.
        source: Where it came from, in a word or two: "--tp", "run.yaml:3", "recipe".
    """

    value: Any
    source: str


Settings = dict[str, Setting]
"""Settings by dotted path, such as `train.lr`."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run's settings, and for each dotted path where its value came from.

    `problems` lists wrong keys and values. Those are left out of `config`, so that what else is
    wrong can be found too.
    """

    config: RunConfig
    sources: Mapping[str, str] = field(repr=False)
    problems: tuple[Problem, ...] = ()


Filler = Callable[[RunConfig, Settings], Settings]
"""Gives values for settings that nobody gave, from those that were."""


def resolve(
    flags: Settings, assignments: list[str], file: Path | None, fill: Filler | None = None
) -> Resolved:
    """Put a run's settings together.

    Args:
        flags: Values from the command line.
        assignments: `--set` items, `train.lr=1e-4`.
        file: YAML file of settings.
        fill: Recipe and derived values; called only if the given settings are right.

    Raises:
        InputError: No model is named, so that nothing more can be said; with all other problems.
    """
    problems: list[Problem] = []
    from_file: Settings = {}
    if file is not None:
        from_file = _collect(lambda: read_file(file, problems), problems)
    unread = bool(problems) and not from_file
    assigned = [read_assignments([item], problems) for item in assignments]
    given = _join([from_file, *assigned, flags], problems)
    if unread and "model" not in given:  # the file may well name one
        raise InputError(problems)
    config = _validate(given, problems)
    filled = {p: s for p, s in fill(config, given).items() if p not in given} if fill else {}
    return Resolved(
        _validate({**filled, **given}, problems), _sources({**filled, **given}), tuple(problems)
    )


def _join(layers: list[Settings], problems: list[Problem]) -> Settings:
    """Put layers over each other, the last one wins; a value that loses must be right too."""
    given: Settings = {}
    for layer in layers:
        for path in (path for path in layer if path in given):
            alone = {"model": Setting("any", DEFAULT), path: given[path]}
            _, found = _validated(alone)
            problems += found.values()
        given |= layer
    return given


def read_assignments(assignments: list[str], problems: list[Problem]) -> Settings:
    """Read `--set` items; what is wrong with them is added to `problems`."""
    found: Settings = {}
    for item in assignments:
        path, equals, text = item.partition("=")
        path = path.strip()
        where = f"--set {item}"
        if not equals:
            problems.append(Problem("no value", where, "write --set train.lr=1e-4"))
        elif path in SECTIONS:
            problems.append(_is_section(path, where))
        elif path not in PATHS:
            problems.append(Problem(f"unknown setting {path}", where, suggestion(path)))
        else:
            found[path] = Setting(_parse(text), "--set")
    return found


def read_file(file: Path, problems: list[Problem]) -> Settings:
    """Read a YAML file of settings; wrong keys in it are added to `problems`.

    Raises:
        InputError: It can't be read, or is no YAML mapping.
    """
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read it: {reason}", f"--config {file}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        message = " ".join(filter(None, (error.context, error.problem)))
        raise InputError(f"not valid YAML: {message}", where, "check the indentation") from error
    except yaml.YAMLError as error:
        raise InputError(f"not valid YAML: {error}", str(file)) from error
    except RecursionError:
        raise InputError("it is nested too deep", f"--config {file}") from None
    if node is None:
        raise InputError("the file is empty", f"--config {file}", "a run needs at least `model:`")
    if not isinstance(node, yaml.MappingNode):
        raise InputError(
            "not a mapping of settings", f"{file}:{node.start_mark.line + 1}",
            "write `model: NAME`, `train:` and so on",
        )  # fmt: skip
    found: Settings = {}
    _walk(node, "", file, found, problems)
    return found


def _walk(node: Any, prefix: str, file: Path, found: Settings, problems: list[Problem]) -> None:
    """Collect the settings of a mapping; sections are walked into."""
    import yaml

    loader = yaml.SafeLoader("")
    for key_node, value_node in node.value:
        path = f"{prefix}{key_node.value}"
        where = f"{file}:{key_node.start_mark.line + 1}"
        empty = value_node.tag == "tag:yaml.org,2002:null"
        if path in SECTIONS:
            if isinstance(value_node, yaml.MappingNode):
                _walk(value_node, f"{path}.", file, found, problems)
            elif not empty:
                problems.append(_is_section(path, where))
        elif path not in PATHS:
            problems.append(Problem(f"unknown setting {path}", where, suggestion(path)))
        elif path in found:
            problems.append(
                Problem(f"{path} is given twice", where, f"also at {found[path].source}")
            )
        else:
            source = f"{file.name}:{key_node.start_mark.line + 1}"
            try:
                found[path] = Setting(loader.construct_object(value_node, deep=True), source)
            except (yaml.YAMLError, ValueError, RecursionError) as error:
                what = getattr(error, "problem", None) or str(error)
                problems.append(Problem(f"{path} has no plain value: {what}", where))
    loader.dispose()


def _parse(text: str) -> Any:
    """Read a value as YAML does; what is no YAML is text."""
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # ValueError: of a date such as 2024-13-45
        return text


def _is_section(path: str, where: str) -> Problem:
    names = ", ".join(p.removeprefix(f"{path}.") for p in PATHS if p.startswith(f"{path}."))
    return Problem(f"{path} is a group of settings, not a value", where, f"it holds {names}")


def _collect(read: Callable[[], Settings], problems: list[Problem]) -> Settings:
    try:
        return read()
    except MsllmError as error:
        problems += error.problems
        return {}


def _validate(settings: Settings, problems: list[Problem]) -> RunConfig:
    """Make the RunConfig. Wrong values are taken out of `settings` and added to `problems`.

    Raises:
        InputError: Without them there is no model.
    """
    config, found = _validated(settings)
    if config is not None:
        return config
    problems += found.values()
    for path in found:
        settings.pop(path, None)
    if "model" not in settings:
        raise InputError(problems)
    return RunConfig.model_validate(_nested(settings))


def _validated(settings: Settings) -> tuple[RunConfig | None, dict[str, Problem]]:
    """Make the RunConfig, or say for each wrong setting what is wrong."""
    try:
        return RunConfig.model_validate(_nested(settings)), {}
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for detail in error.errors():
            path = _setting_of(detail["loc"])
            if path not in found:
                found[path] = _explain(path, dict(detail), settings)
        return None, found


def _nested(settings: Settings) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, setting in settings.items():
        section, _, name = path.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = setting.value
    return nested


def _setting_of(location: tuple[int | str, ...]) -> str:
    names = [str(part) for part in location]
    return ".".join(names[:2]) if ".".join(names[:2]) in PATHS else names[0]


def _explain(path: str, detail: dict[str, Any], settings: Settings) -> Problem:
    """Say in plain words what pydantic found."""
    if detail["type"] == "missing":
        return Problem(
            "no model was named", "--model", "give --model NAME; see `msllm list-models`"
        )
    value = settings[path].value
    source = settings[path].source
    where = f"{source} ({path})" if source != f"--{path}" else source
    if isinstance(value, str):
        value = f"{value!r}"
    return Problem(f"{path} is {value}, but {_expected(detail)}", where)


def _expected(detail: dict[str, Any]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    words = {
        "int_parsing": "must be a whole number",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_parsing": "must be a number",
        "float_type": "must be a number",
        "finite_number": "must be finite",
        "bool_parsing": "must be true or false",
        "bool_type": "must be true or false",
        "list_type": "must be a list",
        "string_type": "must be text",
        "path_type": "must be a path",
        "greater_than": f"must be greater than {_limit(context, 'gt')}",
        "greater_than_equal": f"must be at least {_limit(context, 'ge')}",
        "less_than": f"must be less than {_limit(context, 'lt')}",
        "less_than_equal": f"must be at most {_limit(context, 'le')}",
        "literal_error": f"must be one of {context.get('expected')}",
    }
    return words.get(kind) or re.sub(r"^(Input should|Value error, must)", "must", detail["msg"])


def _limit(context: Mapping[str, Any], key: str) -> str:
    limit = context.get(key, 0)
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def _sources(settings: Settings) -> dict[str, str]:
    return {path: settings[path].source if path in settings else DEFAULT for path in PATHS}
