"""Text as it was typed: escaped for plotly, white space made visible, and how wide it will stand."""

from __future__ import annotations

import html
import unicodedata

_JOINERS = "\u200c\u200d"  # parts of emoji and of Indic and Persian words: they must stay
_VISIBLE = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u3000": "□", "\u2028": "⏎", "\u2029": "⏎"}


def visible(text: str) -> str:
    """Return `text` with white space and control characters drawn as signs (``␣``, ``⏎``), on one line.

    Marks that reverse or hide what follows are named by their code, so that nobody can hide text in a prompt.
    """
    return "".join(map(_sign, text))


def _sign(char: str) -> str:
    if char in _VISIBLE:
        return _VISIBLE[char]
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if char not in _JOINERS and unicodedata.category(char) in ("Cc", "Cf", "Cs"):
        return f"[U+{code:04X}]"
    return char


def escape(text: str) -> str:
    """Return `text` so that plotly draws it as typed.

    Plotly reads a few HTML tags and entities in any text, and hands ``$...$`` to MathJax where the page has one. It knows no
    ``&quot;``, so quotes stay as they are; ``&#36;`` is turned back into a dollar sign only after MathJax had its look.
    """
    return html.escape(text, quote=False).replace("$", "&#36;")


def show(text: str) -> str:
    """Return a token's text ready for plotly: white space visible, everything else as typed."""
    return escape(visible(text))


def excerpt(text: str, limit: int = 60) -> str:
    """Return `text`, or its two ends around an ellipsis when it is longer than `limit` characters."""
    head = (limit - 1) // 2
    return text if len(text) <= limit else f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return about how many pixels `text` takes at `size` pixels, on the wide side (the reader's font is unknown)."""
    return size * (1.08 if bold else 1.0) * sum(map(_ems, text))


def _ems(char: str) -> float:
    if char in "iljI.,:;|'!()[]ftr ":
        return 0.38
    if char in "mwMW%@…—":
        return 0.96
    if unicodedata.east_asian_width(char) in "WF":
        return 1.05
    return 0.7 if char.isupper() else 0.63


def fit(text: str, pixels: float, size: float) -> str:
    """Return `text`, cut with an ellipsis so that it fits into `pixels`; nothing if not even one letter does."""
    if text_width(text, size) <= pixels:
        return text
    room = pixels - text_width("…", size)
    kept = 0
    for char in text:
        room -= text_width(char, size)
        if room < 0:
            break
        kept += 1
    return f"{text[:kept]}…" if kept else ""


def wrap(text: str, pixels: float, size: float) -> list[str]:
    """Return `text` in lines that fit into `pixels`."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and text_width(longer, size) > pixels:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
