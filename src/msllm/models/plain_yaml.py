"""Reads the plain YAML that catalog files are written in, several times as fast as PyYAML.

`msllm list-models` reads every file and must answer at once. Plain are: mappings and sequences by
indentation, flow mappings and sequences of plain or double-quoted scalars (over several lines if
need be), folded text behind `>-`, and comments on lines of their own. The tests hold every file of
the catalog to what PyYAML reads in it.
"""

from __future__ import annotations

import json
import re
from typing import Any

_KEY = re.compile(r"([\w.-]+):(?: +(.*))?$")
_FLOW_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s,:\[\]{}"]+')
_NUMBER = re.compile(r"[-+]?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]\d+)?")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}

Line = tuple[int, str]


def read(text: str) -> Any:
    """The content of a file in plain YAML.

    Raises:
        ValueError: A line that is not plain; the message quotes it.
    """
    lines = [
        (len(line) - len(content), content)
        for line in text.splitlines()
        if (content := line.lstrip()) and not content.startswith("#")
    ]
    value, end = _block(lines, 0)
    if end != len(lines):
        raise ValueError(f"unexpected indentation: {lines[end][1]!r}")
    return value


def _block(lines: list[Line], at: int) -> tuple[Any, int]:
    content = lines[at][1]
    if content.startswith("- "):
        return _sequence(lines, at)
    if content[0] in "[{":
        return _flow(lines, at, content)
    return _mapping(lines, at)


def _sequence(lines: list[Line], at: int) -> tuple[list[Any], int]:
    indent, items = lines[at][0], []
    while at < len(lines) and lines[at][0] == indent and lines[at][1].startswith("- "):
        content = lines[at][1][2:]
        if _KEY.match(content) and content[0] not in '{["':
            lines[at] = (indent + 2, content)
            item, at = _mapping(lines, at)
        else:
            item, at = _value(lines, at, content)
        items.append(item)
    return items, at


def _mapping(lines: list[Line], at: int) -> tuple[dict[str, Any], int]:
    indent, items = lines[at][0], {}
    while at < len(lines) and lines[at][0] == indent:
        match = _KEY.match(lines[at][1])
        if match is None:
            raise ValueError(f"not a plain line: {lines[at][1]!r}")
        key, content = match.groups()
        if content:
            items[key], at = _value(lines, at, content)
        elif at + 1 < len(lines) and lines[at + 1][0] > indent:
            items[key], at = _block(lines, at + 1)
        else:
            items[key], at = None, at + 1
    return items, at


def _value(lines: list[Line], at: int, content: str) -> tuple[Any, int]:
    """What stands behind a key or a dash on line `at`, and where it ends."""
    if content == ">-":
        indent, words, at = lines[at][0], [], at + 1
        while at < len(lines) and lines[at][0] > indent:
            words.append(lines[at][1])
            at += 1
        return " ".join(words), at
    if content[0] in "[{":
        return _flow(lines, at, content)
    return _scalar(content), at + 1


def _flow(lines: list[Line], at: int, content: str) -> tuple[Any, int]:
    at += 1
    while content.count("{") + content.count("[") > content.count("}") + content.count("]"):
        content += " " + lines[at][1]
        at += 1
    return json.loads(_FLOW_TOKEN.sub(_as_json, content)), at


def _as_json(match: re.Match[str]) -> str:
    token = match[0]
    if token[0] == '"' or token in _WORDS or _NUMBER.fullmatch(token):
        return token
    return f'"{token}"'


def _scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if text[0] == '"':
        return json.loads(text)
    if _NUMBER.fullmatch(text):
        return json.loads(text)
    return text
