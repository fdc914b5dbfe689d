"""The legend: one for all pictures, as HTML that wraps with the page."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from kvlab.prompts import SOURCES
from kvlab.views import strings as say
from kvlab.views.frame import FONT
from kvlab.views.palette import Palette, Theme, palette

if TYPE_CHECKING:
    from collections.abc import Iterable

SWATCH = 16


def legend(sources: Iterable[str] = SOURCES, theme: Theme = "light", scale: float = 1.0) -> str:
    """Return what hues and marks mean, as an HTML fragment.

    Parameters
    ----------
    sources : iterable of str
        the sources that occur, of `SOURCES`; drawn in the order of that.
    theme, scale
        see `Frame`.
    """
    c = palette(theme)
    wanted = set(sources)
    blue, size = c.hue("system"), SWATCH * scale
    hues = [_item(say.SOURCE[s], _cell(size, fill=c.hue(s), edge=c.hue(s))) for s in SOURCES if s in wanted]
    marks = [
        _item(say.MARK["reused"], _cell(size, fill=blue, edge=blue)),
        _item(say.MARK["computed"], _cell(size, edge=blue, half=blue)),
        _item(say.MARK["idle"], _cell(size, fill=c.faded("system"), edge=c.faded_edge("system"))),
        _item(say.MARK["free"], _cell(size, edge=c.free)),
        _item(say.MARK["evicted"], _cell(size, edge=c.evicted, width=2.5, cross=c.evicted)),
    ]
    return _block(c, scale, hues) + _block(c, scale, marks)


def _block(c: Palette, scale: float, items: list[str]) -> str:
    style = (
        f"display:flex;flex-wrap:wrap;gap:{4 * scale:g}px {18 * scale:g}px;padding:{4 * scale:g}px;background:{c.background};"
        f"color:{c.ink};font:{13 * scale:g}px {html.escape(FONT)}"
    )
    return f'<div class="kvlab-legend" role="list" style="{style}">{"".join(items)}</div>'


def _item(label: str, swatch: str) -> str:
    return f'<span role="listitem" style="display:inline-flex;align-items:center;gap:.45em">{swatch}{html.escape(label)}</span>'


def _cell(size: float, *, edge: str, fill: str = "none", half: str = "", cross: str = "", width: float = 1.2) -> str:
    inner = f'<path d="M0 8H16V16H0Z" fill="{half}"/>' if half else ""
    inner += (
        f'<rect x="1" y="1" width="14" height="14" fill="{fill}" stroke="{edge}" stroke-width="{width}"/>'
        if not half
        else (f'<rect x=".6" y=".6" width="14.8" height="14.8" fill="none" stroke="{edge}" stroke-width="{width}"/>')
    )
    inner += f'<path d="M5 5L11 11M11 5L5 11" stroke="{cross}" stroke-width="2"/>' if cross else ""
    return f'<svg width="{size:g}" height="{size:g}" viewBox="0 0 16 16" aria-hidden="true">{inner}</svg>'
