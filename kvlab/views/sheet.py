"""A figure under construction, as plain data.

plotly's own ``update_layout``, ``add_shape`` and ``add_annotation`` check every property and copy all that is there already: a
picture took a second that way. A sheet gathers dicts and becomes a Figure once, unchecked; tests check what comes out.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import plotly.graph_objects as go


class Sheet:
    """Traces, axes, shapes and annotations of one figure.

    Parameters
    ----------
    layout : dict
        everything of the layout but axes, shapes and annotations.
    """

    def __init__(self, layout: dict[str, Any]) -> None:
        self.layout = layout
        self._traces: list[dict[str, Any]] = []
        self._shapes: list[dict[str, Any]] = []
        self._notes: list[dict[str, Any]] = []
        self._x: list[dict[str, Any]] = [{}]
        self._y: list[dict[str, Any]] = [{}]

    def split(self, columns: int, gap: float) -> None:
        """Turn the plot area into columns with equal axes, `gap` of its width apart; only the first keeps its y title."""
        width = (1 - gap * (columns - 1)) / columns
        self._x = [{**deepcopy(self._x[0]), "anchor": f"y{_number(i)}"} for i in range(columns)]
        self._y = [{**deepcopy(self._y[0]), "anchor": f"x{_number(i)}"} for i in range(columns)]
        for i, (x, y) in enumerate(zip(self._x, self._y, strict=True)):
            x["domain"] = [i * (width + gap), min(1.0, i * (width + gap) + width)]
            if i:
                y.pop("title", None)

    def xaxis(self, column: int = 0, **settings: Any) -> None:  # noqa: ANN401 - plotly's own properties
        """Set properties of a column's x axis."""
        self._x[column].update(settings)

    def yaxis(self, column: int = 0, **settings: Any) -> None:  # noqa: ANN401 - plotly's own properties
        """Set properties of a column's y axis."""
        self._y[column].update(settings)

    def trace(self, trace: dict[str, Any], column: int = 0) -> None:
        """Add a trace."""
        self._traces.append({**trace, **_axes("xaxis", "yaxis", column)})

    def shape(self, column: int = 0, **shape: Any) -> None:  # noqa: ANN401 - plotly's own properties
        """Add a shape; in data coordinates of a column, unless it brings an ``xref`` or ``yref``."""
        self._shapes.append({**_axes("xref", "yref", column), **shape})

    def note(self, column: int = 0, **note: Any) -> None:  # noqa: ANN401 - plotly's own properties
        """Add text without an arrow; in data coordinates of a column, unless it brings an ``xref`` or ``yref``."""
        self._notes.append({**_axes("xref", "yref", column), "showarrow": False, **note})

    def figure(self) -> go.Figure:
        """Return the figure."""
        axes = {f"xaxis{_number(i)}": axis for i, axis in enumerate(self._x)}
        axes |= {f"yaxis{_number(i)}": axis for i, axis in enumerate(self._y)}
        layout = {**self.layout, **axes, "shapes": self._shapes, "annotations": self._notes}
        return go.Figure({"data": self._traces, "layout": layout}, _validate=False)


def _number(column: int) -> str:
    return str(column + 1) if column else ""


def _axes(x: str, y: str, column: int) -> dict[str, str]:
    return {x: f"x{_number(column)}", y: f"y{_number(column)}"}
