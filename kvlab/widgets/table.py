"""The data behind a picture as columns and rows, for readers who cannot or do not want to see it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MOST_ROWS = 1000
"""Rows that a browser is sent; the table says when there are more."""

Data = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]
"""Columns by name, or one mapping a row."""


_MARKUP = re.compile(r"</?(?:br|b|strong|i|em|u|s|sub|sup|span|a)(?:\s[^<>]*)?/?>", re.IGNORECASE)  # all that plotly knows


def plain_text(text: str) -> str:
    """Return plotly's little markup (``<b>``, ``<br>``, ``&lt;``) as the text that a reader sees."""
    return html.unescape(_MARKUP.sub(lambda tag: " " if tag[0].lower().startswith("<br") else "", text)).strip()


def build_table(data: Data, most_rows: int = MOST_ROWS) -> dict[str, Any]:
    """Bring `data` into the form that the browser draws.

    Returns
    -------
    dict
        ``columns`` (names), ``rows`` (lists of str, int, float, bool or None; at most `most_rows`), ``total`` (rows there are).
    """
    if isinstance(data, Mapping):
        columns = [str(name) for name in data]
        values = list(data.values())
        lengths = {len(column) for column in values}
        if len(lengths) > 1:
            msg = f"The columns of a table must be of one length, these are {sorted(lengths)}: {', '.join(columns)}."
            raise ValueError(msg)
        total = lengths.pop() if lengths else 0
        rows: Iterable[Iterable[Any]] = zip(*(column[:most_rows] for column in values), strict=True)
    else:
        names = list(dict.fromkeys(name for row in data for name in row))
        columns = [str(name) for name in names]
        total = len(data)
        rows = ([row.get(name) for name in names] for row in data[:most_rows])
    return {"columns": columns, "rows": [[_plain(value) for value in row] for row in rows], "total": total}


def figure_data(figure: Figure) -> list[dict[str, Any]]:
    """Return what a figure's own traces hold, a row a point: the table of a picture that brings none."""
    rows: list[dict[str, Any]] = []
    for number, trace in enumerate(figure.data):
        name = plain_text(str(trace.name or f"{trace.type} {number + 1}"))
        held = {key: trace[key] for key in ("x", "y", "z", "base", "text") if key in trace and trace[key] is not None}
        points = _grid(held) if np.ndim(held.get("z", 0)) == 2 else _points(held)
        rows.extend({"trace": name, **point} for point in points)
    return rows


def _points(held: dict[str, Any]) -> Iterable[dict[str, Any]]:
    lists = {key: value for key, value in held.items() if not isinstance(value, str) and np.ndim(value) == 1}
    for index in range(max(map(len, lists.values()), default=0)):
        point = {key: value[index] for key, value in lists.items() if index < len(value)}
        if point.get("x", 0) is not None and point.get("y", 0) is not None:  # None only lifts the pen
            yield {key: plain_text(value) if isinstance(value, str) else value for key, value in point.items()}


def _grid(held: dict[str, Any]) -> Iterable[dict[str, Any]]:
    z = held["z"]
    xs, ys = held.get("x"), held.get("y")
    for row, values in enumerate(z):
        for column, value in enumerate(values):
            if value is not None and value == value:  # noqa: PLR0124 - nan is a hole in the map
                yield {
                    "x": column if xs is None else xs[column],
                    "y": row if ys is None else ys[row],
                    "z": value,
                }


def _plain(value: Any) -> str | float | bool | None:  # noqa: ANN401 - a cell can hold anything
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)  # JSON has no nan
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
