"""The lines of a recorded trace: JSON objects, read one by one; what is wrong is said with file, line and field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from kvlab.cache.checks import MAX_PRIORITY, MAX_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Fields = dict[str, Any]


class ReplayError(ValueError):
    """A trace cannot be run: one sentence that names its file, the line and the field."""


class Shape(NamedTuple):
    """The fields of a header or an operation."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


class Lines:
    """A trace's lines, empty ones passed over.

    Parameters
    ----------
    texts : iterable of str
    name : str
        what errors call the trace: its file.

    Attributes
    ----------
    number : int
        of the line read last, from 1.
    """

    def __init__(self, texts: Iterable[str], name: str) -> None:
        self.name = name
        self.number = 0
        self._texts = iter(texts)
        self._ahead = ""

    def peek(self) -> str:
        """Return the next line that is not empty, without taking it; an empty text at the end."""
        while not self._ahead.strip():
            self.number += 1
            try:
                self._ahead = next(self._texts)
            except StopIteration:
                return ""
            except UnicodeDecodeError as error:
                self.refuse(None, f"this is no text in UTF-8 ({error.reason})")
        return self._ahead

    def next(self) -> Fields | None:
        """Return the object on the next line that is not empty; None at the end."""
        text, self._ahead = self.peek(), ""
        if not text:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            self.refuse(None, f"this is no JSON ({error})")
        if not isinstance(value, dict):
            self.refuse(None, f"{short(value)} is no JSON object")
        return value

    def fields(self, given: Fields, shape: Shape) -> Fields:
        """Return the fields of an object without nulls; refuse what is missing, unknown or of a wrong kind."""
        fields = {name: value for name, value in given.items() if value is not None}
        for name in shape.needed:
            if name not in fields:
                self.refuse(name, "is missing")
        for name, value in fields.items():
            if name not in shape.needed + shape.optional:
                self.refuse(name, f"is not known here; there are {', '.join(shape.needed + shape.optional) or 'none'}")
            words, fits = KINDS[name]
            if not fits(value):
                self.refuse(name, f"is {short(value)}, but must be {words}")
        return fields

    def refuse(self, field: str | None, what: str) -> NoReturn:
        """Raise the ReplayError that names this line."""
        place = f"{self.name}, line {self.number}" + (f", field {field!r}" if field else "")
        msg = f"{place}: {what.removesuffix('.')}."
        raise ReplayError(msg) from None


_MOST = 10**8  # blocks, tokens: what a header or a number of tokens can sensibly be


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object, least: int = 0, most: int = _MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_token(value: object) -> bool:
    return _is_count(value, 0, MAX_TOKEN)


def _is_prompt(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_token, value))


def _is_item(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and _is_text(value[0]) and _is_count(value[1]) and _is_count(value[2], 1)


def _is_row(value: object) -> bool:
    return isinstance(value, str) and len(value) % 2 == 0 and all(c in "0123456789abcdef" for c in value)


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("id", "salt", "extra_key", "lora", "hash", "hash_seed", "policy"), ("text", _is_text)),
    **dict.fromkeys(("enable_caching", "enable", "overlap", "skip_read", "last"), ("true or false", _is_flag)),
    **dict.fromkeys(
        ("num_blocks", "block_size", "max_num_batched_tokens", "num_tokens", "page_size", "chunk", "max_output", "max_new", "n"),
        (f"a whole number from 0 to {_MOST:,}", _is_count),
    ),
    **dict.fromkeys(("processed_tokens", "seed", "arrival"), (f"a whole number from 0 to {_MOST:,}", _is_count)),
    "items": (
        "a list of [identifier, start, length]",
        lambda value: isinstance(value, list) and all(map(_is_item, value)),
    ),
    "embeds": (
        "a list of the embeddings' bytes in hex, one a position",
        lambda value: isinstance(value, list) and all(map(_is_row, value)),
    ),
    "routing_key": ("text", _is_text),
    "running_keys": ("a list of texts", lambda value: isinstance(value, list) and all(map(_is_text, value))),
    "cached": (
        f"a list of lists of token ids from 0 to {MAX_TOKEN:,}, none of them empty",
        lambda value: isinstance(value, list) and all(map(_is_prompt, value)),
    ),
    "queue": ("a list of requests", lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value)),
    "watermark": ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    "priority": ("a whole number", lambda value: _is_count(value, -MAX_PRIORITY, MAX_PRIORITY)),
    "token": (f"a token id from 0 to {MAX_TOKEN:,}", _is_token),
    "tokens": (
        f"a list of token ids from 0 to {MAX_TOKEN:,}",
        lambda value: isinstance(value, list) and all(map(_is_token, value)),
    ),
    "reason": ('"stop" or "length"', lambda value: value in ("stop", "length")),
    "reqs": ("a list of requests", lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value)),
}


def short(value: object) -> str:
    """Return a value as JSON, at most 100 characters of it."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else f"{text[:97]}..."
