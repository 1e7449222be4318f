"""Cutting a very long text where that changes none of its tokens.

The tokenizers library takes a hundred times a text's size while it encodes it: a book of a
gigabyte would need a hundred. So long texts are encoded in pieces, cut only where the tokenizer's
own pre-tokenizer has a bound, which no token crosses. Tokenizers without such bounds get their
texts whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

LONG = 1 << 20
"""Characters from which a text is cut, and of a piece at most."""
WINDOW = 256
"""Characters looked at on both sides of a cut."""
TRIES = 16
LOCAL_NORMALIZERS = {"NoneType", "NFC", "NFD", "NFKC", "NFKD"}
"""Normalizers that do to a piece what they do to it inside its text."""

# After the end of a line, or before a space between words.
PLACES = re.compile(r"(?<=\n)(?=\S)|(?<=\S)(?= \S)")


def pieces(text: str, tokenizer: Any) -> Iterator[str]:
    """Yield `text` in pieces of at most LONG characters whose ids, put together, are its ids.

    A piece is longer where `tokenizer` (of the tokenizers library) leaves no place to cut.
    """
    start = 0
    while len(text) - start > LONG:
        end = _place(text, start, tokenizer)
        if end is None:
            break
        yield text[start:end]
        start = end
    yield text[start:]


def _place(text: str, start: int, tokenizer: Any) -> int | None:
    """Find the last good place to cut in the LONG characters from `start` on."""
    if tokenizer.pre_tokenizer is None:
        return None
    if type(tokenizer.normalizer).__name__ not in LOCAL_NORMALIZERS:
        return None
    limit = start + LONG
    found = [
        match.start() for match in PLACES.finditer(text, max(start, limit - 16 * WINDOW), limit)
    ]
    for at in reversed(found[-TRIES:]):
        if at > start and _changes_nothing(
            text[at - WINDOW : at], text[at : at + WINDOW], tokenizer
        ):
            return at
    return None


def _changes_nothing(left: str, right: str, tokenizer: Any) -> bool:
    """Whether the pre-tokenizer has a bound between the two, and their ids are those of both."""
    bounds = {end for _, (_, end) in tokenizer.pre_tokenizer.pre_tokenize_str(left + right)}
    if len(left) not in bounds:
        return False
    both, first, second = (
        tokenizer.encode(part, add_special_tokens=False).ids for part in (left + right, left, right)
    )
    return bool(both == first + second)
