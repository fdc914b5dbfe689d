"""The block map: every block of the pool as a cell, in use, cached idle or free, in the hue of most of its tokens."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvlab.prompts import SOURCES
from kvlab.views import strings as say
from kvlab.views.frame import CLEAR, Cells, Frame, listed
from kvlab.views.ownership import FREE, IDLE, NULL, STATES, USED, Units, idle_order, units

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import plotly.graph_objects as go

    from kvlab.cache.state import State
    from kvlab.trace.recorder import Record
    from kvlab.views.palette import Theme
    from kvlab.views.sheet import Sheet

    Records = Mapping[str, Record] | Iterable[Record]

CELL_SIZES = (30.0, 26.0, 22.0, 19.0, 17.0, 15.0)  # pixels; smaller ones are not seen from the back row
MAX_HEIGHT = 260  # pixels for all rows of cells
GAP = 0.14  # of a cell
INSET = 0.15
EVICTED_LINE, SELECTED_LINE = 2.5, 3.0


class _Cell(NamedTuple):
    """One cell: units [first, last], what most of them are."""

    first: int
    last: int
    state: int
    source: int
    computed: bool


def block_map(
    state: State | None,
    records: Records,
    *,
    just_evicted: Iterable[int] = (),
    selected: int | Iterable[int] | None = None,
    theme: Theme = "light",
    scale: float = 1.0,
    width: float = 500,
    columns: int | None = None,
) -> go.Figure:
    """Draw the pool.

    Parameters
    ----------
    state : State or None
        the cache at one moment; None before there is one.
    records : Record, or dict of id to Record
        tell where tokens come from; of equal blocks the latest request's word counts.
    just_evicted : iterable of int
        blocks or pages whose content was evicted in the last step: a red edge and a cross.
    selected : int or iterable of int, optional
        blocks or pages to be framed.
    theme, scale, width
        see `Frame`.
    columns : int, optional
        cells in a row; as many as fit by default.

    Returns
    -------
    plotly Figure
        ``customdata`` of a cell is [first, last] unit. Where a cell for each would be too small to see, a cell stands for several
        and the subtitle says for how many.
    """
    frame = Frame(theme, scale, width)
    if state is None:
        return frame.empty(say.BLOCKS["vllm"], say.EMPTY, MAX_HEIGHT * scale / 2)
    pool = units(state, listed(records))
    total = len(pool.state)
    left = (36 + 8 * len(say.number(total))) * scale  # what the largest row label needs
    plot = max(width - left - 8 * scale, 40.0)
    size, per = _fit(total, plot / scale, columns)
    across = columns or _across(plot / scale, size)
    cells = _aggregate(pool, per)
    rows = math.ceil(len(cells) / across)
    subtitle = counts(state, pool)
    if per > 1:
        subtitle += "; " + say.CELL_IS.format(n=say.number(per), units=_names(state)[1])
    title = (say.SLOTS if state.unit == 1 else say.BLOCKS)[state.policy]
    high = max(rows, 3)
    sheet = frame.sheet(
        title, subtitle, high * size * scale, x_title="", axis=False, left=left, right=8 * scale, y_title=_names(state)[0]
    )
    sheet.xaxis(range=[0, plot / (size * scale)])
    every = max(1, math.ceil(18 / size))
    sheet.yaxis(
        range=[high, 0],
        tickvals=[r + 0.5 for r in range(0, rows, every)],
        ticktext=[say.number(cells[r * across].first) for r in range(0, rows, every)],
    )
    places = _places(state)
    hovers = [_hover(state, pool, cell, places) for cell in cells]
    _draw(sheet, frame, cells, hovers, across=across, evicted=set(just_evicted), chosen=_chosen(selected))
    return sheet.figure()


def counts(state: State, pool: Units) -> str:
    """Return "68 in use, 5 cached idle, 183 free"."""
    used, idle = pool.count(USED), pool.count(IDLE)
    text = say.COUNTS_UNLIMITED if state.num_units is None else say.COUNTS
    return text.format(used=say.number(used), idle=say.number(idle), free=say.number(pool.count(FREE)))


def summary(state: State | None) -> str:
    """Say in words how much of the pool is in use, cached idle and free."""
    if state is None:
        return say.EMPTY
    pool = units(state, [])
    total = say.count(len(pool.state) - 1, *_names(state))
    return say.SUMMARY_BLOCKS.format(policy=say.POLICY[state.policy], counts=counts(state, pool), total=total)


def table(state: State | None, records: Records) -> list[dict[str, Any]]:
    """Return the pool as stretches of neighbours in the same state, a dict each."""
    if state is None:
        return []
    pool = units(state, listed(records))
    look = np.stack([pool.state, pool.source, pool.computed, pool.held])
    edges = [0, *(np.flatnonzero((look[:, 1:] != look[:, :-1]).any(axis=0)) + 1).tolist(), len(pool.state)]
    out = []
    for first, stop in pairwise(edges):
        kind, kept = int(pool.state[first]), pool.state[first] in (USED, IDLE)
        out.append(
            {
                say.COLUMN["first"]: first,
                say.COLUMN["last"]: stop - 1,
                _names(state)[1]: stop - first,
                say.COLUMN["state"]: say.STATE[STATES[kind]],
                say.COLUMN["source"]: _source(int(pool.source[first])) if kept else None,
                say.MARK["computed"]: bool(pool.computed[first]) if kind == USED else None,
                say.COLUMN["held"]: int(pool.held[first]) if kept else None,
            }
        )
    return out


# ------------------------------------------------------------------ parts of the picture
def _names(state: State) -> tuple[str, str]:
    return say.SLOT if state.unit == 1 else say.UNIT[state.policy]


def _source(index: int) -> str:
    return say.SOURCE[SOURCES[index] if index >= 0 else "unknown"]


def _chosen(selected: int | Iterable[int] | None) -> set[int]:
    return set() if selected is None else {selected} if isinstance(selected, int) else set(selected)


def _across(plot: float, size: float) -> int:
    """Return how many cells stand in a row: a multiple of four, so that rows begin with numbers that can be read."""
    most = max(1, int(plot / size))
    return most - most % 4 if most >= 8 else most


def _fit(total: int, plot: float, columns: int | None) -> tuple[float, int]:
    """Return the size of a cell in pixels and how many units it stands for, so that all fit into the height."""
    for size in CELL_SIZES:
        across = columns or _across(plot, size)
        if math.ceil(total / across) * size <= MAX_HEIGHT and (columns is None or columns * size <= plot):
            return size, 1
    size = float(CELL_SIZES[-1]) if columns is None else min(CELL_SIZES[-1], plot / columns)
    room = (columns or _across(plot, size)) * max(1, int(MAX_HEIGHT / size))
    per = 2
    while math.ceil(total / per) > room:
        per *= 2
    for larger in CELL_SIZES:  # few cells may be larger again
        if columns is None and math.ceil(math.ceil((total - 1) / per) / _across(plot, larger)) * larger <= MAX_HEIGHT:
            return larger, per
    return size, per


def _aggregate(pool: Units, per: int) -> list[_Cell]:
    """Return the cells; of several units the most frequent state, and among those the most frequent source."""
    if per == 1:
        looks = zip(pool.state.tolist(), pool.source.tolist(), pool.computed.tolist(), strict=True)
        return [_Cell(i, i, *look) for i, look in enumerate(looks)]
    out = []
    for first in range(1, len(pool.state), per):  # unit 0, which is never used, has no cell then
        at = slice(first, min(first + per, len(pool.state)))
        kinds = np.bincount(pool.state[at], minlength=4)
        kind = int(max((USED, IDLE, FREE), key=lambda k: kinds[k]))
        those = pool.state[at] == kind
        votes = np.bincount(pool.source[at][those] + 1, minlength=len(SOURCES) + 1)[1:]
        source = int(votes.argmax()) if votes.any() else -1
        out.append(_Cell(first, at.stop - 1, kind, source, bool(pool.computed[at][those].mean() > 0.5)))
    return out


def _draw(
    sheet: Sheet, frame: Frame, cells: list[_Cell], hovers: list[str], *, across: int, evicted: set[int], chosen: set[int]
) -> None:
    marks, edges = Cells(frame), Cells(frame)
    c, half = frame.colours, (1 - GAP) / 2
    crossed: list[tuple[float, float]] = []
    for i, (cell, hover) in enumerate(zip(cells, hovers, strict=True)):
        x, y = i % across + 0.5, i // across + 0.5
        data, those = [cell.first, cell.last], range(cell.first, cell.last + 1)
        mark = {NULL: "null", FREE: "free", IDLE: "idle", USED: "computed" if cell.computed else "reused"}[cell.state]
        source = SOURCES[cell.source] if cell.source >= 0 else None
        just = not evicted.isdisjoint(those)
        inner = half - (INSET if just else 0)  # room between a red edge and the hue of what took the place
        marks.cell(x - inner, x + inner, y, 2 * inner, mark=mark, source=source, hover=hover, data=data)
        if just:
            note = f"{hover}<br>{say.HOVER_EVICTED}"
            edges.add(x - half, x + half, y, 1 - GAP, fill=CLEAR, edge=c.evicted, line=EVICTED_LINE, hover=note, data=data)
            crossed.append((x, y))
        if not chosen.isdisjoint(those):
            edges.add(x - 0.5, x + 0.5, y, 1.0, fill=CLEAR, edge=c.ink, line=SELECTED_LINE, hover=hover, data=data)
    sheet.trace(marks.trace())
    if edges.rows:
        sheet.trace(edges.trace())
    if crossed:  # an edge alone is a matter of colour
        xs, ys = zip(*crossed, strict=True)
        for colour, width in ((c.background, 5), (c.evicted, 2)):  # with a halo, for it may lie on any hue
            marker = {"symbol": "x-thin", "size": 6 * frame.scale, "line": {"color": colour, "width": width * frame.scale}}
            sheet.trace({"type": "scatter", "x": xs, "y": ys, "mode": "markers", "marker": marker, "hoverinfo": "skip"})


def _places(state: State) -> dict[int, int]:
    """Return the place of every cached idle block in the queue, from 1."""
    return {block: place for place, block in enumerate(idle_order(state), 1)}


def _hover(state: State, pool: Units, cell: _Cell, places: dict[int, int]) -> str:
    name, many = _names(state)
    kept = cell.state in (USED, IDLE)
    lines = []
    if kept:
        lines.append(_source(cell.source))
        if cell.state == USED and pool.held[cell.first : cell.last + 1].any():
            lines[-1] = say.HOVER_MARK.format(source=lines[-1], mark=say.MARK["computed" if cell.computed else "reused"])
    if cell.last > cell.first:
        kinds = np.bincount(pool.state[cell.first : cell.last + 1], minlength=4)
        words = say.COUNTS.format(used=kinds[USED], idle=kinds[IDLE], free=kinds[FREE])
        first, last = say.number(cell.first), say.number(cell.last)
        return "<br>".join([say.HOVER_UNITS.format(name=many.capitalize(), first=first, last=last, counts=words), *lines])
    if cell.state == NULL:
        return say.HOVER_NULL.format(name=name.capitalize())
    if kept and pool.position[cell.first] >= 0:
        start = int(pool.position[cell.first])
        lines.append(say.span(start, start + state.unit))
    if pool.held[cell.first]:
        lines.append(say.HOVER_HELD.format(requests=say.count(int(pool.held[cell.first]), *say.REQUESTS)))
    if cell.first in places:
        lines.append(say.HOVER_PLACE.format(ordinal=say.ordinal(places[cell.first])))
    title = say.HOVER_UNIT.format(name=name.capitalize(), id=say.number(cell.first), state=say.STATE[STATES[cell.state]])
    return "<br>".join([title, *lines])
