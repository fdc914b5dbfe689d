"""A table of numbers as HTML: what "Show data" shows under a chart."""

from __future__ import annotations

import html as _html
from typing import TYPE_CHECKING, Any

from kvlab.views import strings as say
from kvlab.views.frame import FONT
from kvlab.views.palette import Theme, palette

if TYPE_CHECKING:
    from collections.abc import Sequence


def html(rows: Sequence[dict[str, Any]], theme: Theme = "light", scale: float = 1.0, *, max_rows: int = 200) -> str:
    """Return rows as an HTML table; every text shows as typed, with ``<`` and ``$`` out of reach of HTML and MathJax.

    Parameters
    ----------
    rows : sequence of dict
        as a view's ``table`` gives them, the first row's keys being the columns.
    theme, scale
        see `Frame`.
    max_rows : int
        of more rows the first are shown, and the rest counted.
    """
    c = palette(theme)
    style = f"color:{c.ink};background:{c.background};font:{13 * scale:g}px {_html.escape(FONT)}"
    if not rows:
        return f'<p class="kvlab-table" style="{style}">{say.NO_ROWS}</p>'
    cell = f"padding:{3 * scale:g}px {10 * scale:g}px;border-bottom:1px solid {c.line}"
    head = "".join(f'<th scope="col" style="{cell};text-align:left">{_html.escape(name)}</th>' for name in rows[0])
    body = "".join(f"<tr>{''.join(_td(value, cell) for value in row.values())}</tr>" for row in rows[:max_rows])
    more = f"<p>{say.MORE_ROWS.format(n=say.number(len(rows) - max_rows))}</p>" if len(rows) > max_rows else ""
    return (
        f'<div class="kvlab-table tex2jax_ignore mathjax_ignore" style="overflow-x:auto;{style}">'
        f'<table style="border-collapse:collapse;color:inherit;font:inherit"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>{more}</div>"
    )


def _td(value: object, cell: str) -> str:
    if isinstance(value, bool):
        value = "✓" if value else ""
    right = ";text-align:right;font-variant-numeric:tabular-nums" if isinstance(value, int | float) else ""
    text = "" if value is None else say.number(value) if isinstance(value, int) else str(value)
    return f'<td style="{cell}{right}">{_html.escape(text)}</td>'
