"""The prompts of the article: a shared part, a timestamp, a question, laid out in the orders that make or break a cache hit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from kvlab.prompts import Part, Prompt

Timestamp = Literal["before", "between", "after", "none"]
TIMESTAMPS: tuple[Timestamp, ...] = ("before", "between", "after", "none")

OPENING = (
    "You are the assistant of a company's internal help desk. Answer in at most five sentences, name the page of the handbook "
    "that you rely on, and say so when the handbook does not tell. Never ask for a password. The handbook follows.\n"
)
TOPICS = (
    ("Passwords", "A password expires after ninety days; the change is made on the account page and reaches all services in ten minutes."),
    ("Printers", "Each floor has two printers; a job waits at the printer until a badge is held to the reader, and for one day at most."),
    ("Travel", "A trip is booked through the travel desk at least one week ahead; receipts are handed in within thirty days of the return."),
    ("Laptops", "A laptop is replaced after four years, or sooner when its battery holds less than half of what it held when new."),
    ("Meeting rooms", "A room that nobody enters within fifteen minutes is given free again, and the organiser is told by mail."),
    ("Remote access", "The tunnel asks for the second factor once a day; a connection without traffic is closed after an hour."),
    ("Expenses", "Amounts below twenty five need no receipt; larger ones need one, with the tax shown, and the name of the project."),
    ("Mail", "A mailbox holds fifty gigabytes; what is older than two years moves to the archive, where the search finds it."),
    ("Badges", "A lost badge is reported to the front desk at once, so that it opens no door; a new one is ready the next morning."),
    ("Software", "Programs are installed from the catalogue; what it lacks is asked for with a sentence on what it is needed for."),
    ("Backups", "Files on the shared drive are copied every night and kept for three months; a laptop's own disk is not copied."),
    ("Leave", "Days off are entered in the calendar tool and confirmed by the team lead; ten days may move into the next year."),
)
QUESTIONS = (
    "How do I change my password when the account page says that it has expired already, and how long until the mail program knows?",
    "Why does the printer on the third floor keep my job waiting although I held my badge to it twice, and where does the job go tomorrow?",
    "When must the receipts of a trip be handed in if I return on the last day of the month and the travel desk is closed?",
    "Can a laptop be replaced after three years if its battery lasts for less than an hour, and who decides about it?",
    "Which of my files come back if the disk of my laptop breaks tonight, and what would have been copied from the shared drive?",
    "Where do I report that I lost my badge on the way home, and will the doors of the building still open to it until then?",
    "Does the tunnel close while a long download runs over night, and does it ask for the second factor again in the morning?",
    "Is a receipt needed for a taxi of nineteen, and which project do I name if the ride was for two of them?",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


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
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer

    def prompt(self, layout: Layout, number: int) -> Prompt:
        """Return request `number` (0, 1, ...) of a layout: the shared part is always the same, the rest begins differently each time.

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
        ids = self._encode(OPENING)
        page = 1
        while len(ids) < length:
            topic, text = TOPICS[(page - 1) % len(TOPICS)]
            ids += self._encode(f"Page {page}. {topic}. {text}\n")
            page += 1
        return ids[:length]

    def _stamp(self, number: int) -> list[int]:
        # the day comes first, so that two stamps differ in their first token
        day, hour, minute = DAYS[number % len(DAYS)], 9 + number % 8, 7 * number % 60
        return self._encode(f"{day}, {hour}:{minute:02d}:{31 * number % 60:02d}.\n")

    def _question(self, length: int, number: int) -> list[int]:
        ids: list[int] = []
        turn = 0
        while len(ids) < length:
            ids += self._encode(QUESTIONS[(number + turn) % len(QUESTIONS)] + "\n")
            turn += 1
        return ids[:length]

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a text, no template's or start token among them; without a tokenizer one id a word."""
        if self._tokenizer is None:
            return [sum(word.encode()) * 31 % self.vocab_size for word in text.split()]
        return self._tokenizer.encode(text, add_special_tokens=False)
