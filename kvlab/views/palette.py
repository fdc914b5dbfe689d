"""The one palette: what a colour means, in a light and a dark theme, for every eye.

Hue says where a token comes from. The seven hues were searched so that each stands out from its background by at least 3:1
(WCAG 1.4.11) and any two stay apart for normal sight, protanopia and deuteranopia alike; tests/test_views.py measures both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Theme = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of one theme, all ``#rrggbb``.

    Attributes
    ----------
    background, panel, ink, mute, line : str
        page, card, text, secondary text, hairlines.
    free : str
        edge of a free cell.
    evicted : str
        edge of a cell whose content was just evicted.
    prefill : str
        time spent on prefill; decode has the hue of generated tokens.
    unknown : str
        tokens whose request nobody remembers.
    idle_fill, idle_edge : float
        how much of its hue a cached idle cell keeps.
    sources : dict of str to str
        one hue for each of `kvlab.prompts.SOURCES`.
    """

    background: str
    panel: str
    ink: str
    mute: str
    line: str
    free: str
    evicted: str
    prefill: str
    unknown: str
    idle_fill: float
    idle_edge: float
    sources: dict[str, str]

    def hue(self, source: str | None) -> str:
        """Return the colour of a source; of no known one, the neutral colour."""
        return self.sources.get(source or "", self.unknown)

    def faded(self, source: str | None) -> str:
        """Return the fill of a cell that is cached but idle."""
        return blend(self.hue(source), self.background, self.idle_fill)

    def faded_edge(self, source: str | None) -> str:
        """Return the edge of a cell that is cached but idle: faded cells must be seen from the back row too."""
        return blend(self.hue(source), self.background, self.idle_edge)

    def on(self, fill: str) -> str:
        """Return the text colour that reads best on `fill`."""
        return max(("#ffffff", "#000000"), key=lambda text: contrast(text, fill))


LIGHT = Palette(
    background="#ffffff",
    panel="#f3f6f9",
    ink="#1b1f24",
    mute="#57606a",
    line="#d0d7de",
    free="#a9b2bc",
    evicted="#cf222e",
    prefill="#59656f",
    unknown="#7d858d",
    idle_fill=0.3,
    idle_edge=0.65,
    sources={
        "system": "#0b63b5",
        "timestamp": "#9c1468",
        "tools": "#17957c",
        "history": "#9067f2",
        "retrieved": "#2f3a08",
        "question": "#c27f00",
        "generated": "#a84300",
    },
)

DARK = Palette(
    background="#10151c",
    panel="#1b222c",
    ink="#f0f3f6",
    mute="#a9b4c0",
    line="#3a434f",
    free="#5d6875",
    evicted="#ff5c66",
    prefill="#a7b1bc",
    unknown="#8b949e",
    idle_fill=0.4,
    idle_edge=0.75,
    sources={
        "system": "#4fa3f0",
        "timestamp": "#d4589f",
        "tools": "#3cc9a7",
        "history": "#8a63f5",
        "retrieved": "#e3eca0",
        "question": "#dba033",
        "generated": "#c65514",
    },
)


def palette(theme: Theme) -> Palette:
    """Return the palette of a theme.

    Raises
    ------
    ValueError
        for a theme other than ``light`` and ``dark``.
    """
    if theme not in ("light", "dark"):
        msg = f"theme {theme!r} is not known: choose 'light' or 'dark'."
        raise ValueError(msg)
    return LIGHT if theme == "light" else DARK


def rgb(colour: str) -> tuple[float, float, float]:
    """Return red, green and blue of ``#rrggbb`` in 0 .. 1."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def blend(colour: str, other: str, share: float) -> str:
    """Return `share` of `colour` laid over `other`."""
    mixed = (round(255 * (share * a + (1 - share) * b)) for a, b in zip(rgb(colour), rgb(other), strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def luminance(colour: str) -> float:
    """Return WCAG's relative luminance, 0 .. 1."""
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(colour: str, other: str) -> float:
    """Return WCAG's contrast ratio, 1 .. 21."""
    dark, light = sorted((luminance(colour), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
