"""The prompts of the article: a shared part, a timestamp, a question, laid out in the orders that make or break a cache hit."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Literal, Protocol

from kvlab.prompts import Part, Prompt

Timestamp = Literal["before", "between", "after", "none"]
TIMESTAMPS: tuple[Timestamp, ...] = ("before", "between", "after", "none")

DESK = tomllib.loads(resources.files("kvlab").joinpath("help_desk.toml").read_text(encoding="utf-8"))


class Tokenizer(Protocol):
    """What a writer needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Layout:
    """How long the parts of a prompt are, in tokens, and where the timestamp stands."""

    timestamp: Timestamp = "none"
    shared: int = 1000
    question: int = 40


class Writer:
    """Writes the prompts of a layout with the tokens of one model.

    Parameters
    ----------
    tokenizer : tokenizer or None
        transformers' own; None for a model without one, whose prompts are numbers.
    vocab_size : int
        ids run below it.

    Raises
    ------
    ValueError
        for a tokenizer that makes no tokens of a text.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        places = self._distinct([f"{place}, 09:00:00." for place in DESK["days"] + DESK["cities"]])
        lengths = [len(self._encode(text)) for text in places]
        self._stamp_length = lengths[0] if lengths else 0
        # equally long prompts can be compared, so a place of one token more costs its stamp the full stop
        self._stamps = [text for text, length in zip(places, lengths, strict=True) if 0 <= length - self._stamp_length <= 1]
        if not self._stamps:
            msg = "the tokenizer makes no tokens of English text, so no prompts can be written with it: choose another model."
            raise ValueError(msg)
        questions = DESK["questions"]
        moved = [f"{city}: {questions[n % len(questions)]}" for n, city in enumerate(DESK["cities"])]
        self._questions = self._distinct([text + "\n" for text in questions + moved])

    def prompt(self, layout: Layout, number: int) -> Prompt:
        """Return request `number` (0, 1, ...) of a layout: the shared part is the same, the rest begins with another token.

        With the default model no two of the first 38 requests begin alike; later ones may.

        Raises
        ------
        ValueError
            for a timestamp that is not one of `TIMESTAMPS`, or lengths below 1.
        """
        if layout.timestamp not in TIMESTAMPS:
            msg = f"the timestamp stands {layout.timestamp!r}: choose one of {', '.join(TIMESTAMPS)}."
            raise ValueError(msg)
        if layout.shared < 1 or layout.question < 1:
            msg = f"shared part and question are {layout.shared} and {layout.question} tokens long: give each at least 1."
            raise ValueError(msg)
        stamp = ("timestamp", self._stamp(number)) if layout.timestamp != "none" else None
        pieces = [("system", self._shared(layout.shared)), ("question", self._question(layout.question, number))]
        if stamp:
            pieces.insert(("before", "between", "after").index(layout.timestamp), stamp)
        ids: list[int] = []
        parts: list[Part] = []
        for source, tokens in pieces:
            parts.append(Part(source, len(ids), len(ids) + len(tokens)))
            ids += tokens
        return Prompt(tuple(ids), tuple(parts))

    def _shared(self, length: int) -> list[int]:
        ids = self._encode(DESK["opening"])
        page = 1
        while len(ids) < length:
            text = DESK["pages"][(page - 1) % len(DESK["pages"])]
            ids += self._encode(f"Page {page}. {text}\n")
            page += 1
        return ids[:length]

    def _stamp(self, number: int) -> list[int]:
        time = f"{9 + number % 8:02d}:{7 * number % 60:02d}:{31 * number % 60:02d}"
        text = self._stamps[number % len(self._stamps)].replace("09:00:00", time)
        return self._encode(text)[: self._stamp_length] + self._encode("\n")

    def _question(self, length: int, number: int) -> list[int]:
        ids: list[int] = []
        turn = 0
        while len(ids) < length:
            ids += self._encode(self._questions[(number + turn) % len(self._questions)])
            turn += 1
        return ids[:length]

    def _distinct(self, texts: list[str]) -> list[str]:
        """Return the texts whose first token no earlier one has."""
        found: dict[int, str] = {}
        for text in texts:
            for first in self._encode(text)[:1]:
                found.setdefault(first, text)
        return list(found.values())

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a text, no template's or start token among them; without a tokenizer one id a word."""
        if self._tokenizer is None:
            return [sum(word.encode()) * 31 % self.vocab_size for word in text.split()]
        return self._tokenizer.encode(text, add_special_tokens=False)
