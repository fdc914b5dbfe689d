"""The radix tree: a node is a bar at its token positions, so that a branch stands where prompts part."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.cache.eviction import eviction_key
from kvlab.cache.state import ROOT
from kvlab.prompts import SOURCES
from kvlab.views import strings as say
from kvlab.views.frame import CLEAR, Cells, Frame, listed, tick_step
from kvlab.views.ownership import depths, node_sources, sources
from kvlab.views.text import text_width

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import plotly.graph_objects as go

    from kvlab.cache.state import Node, State
    from kvlab.trace.recorder import Record
    from kvlab.views.palette import Theme
    from kvlab.views.sheet import Sheet

    Records = Mapping[str, Record] | Iterable[Record]

MAX_LEAVES = 8


@dataclass
class _Place:
    """Where a node stands: token positions [start, stop), row y."""

    start: int
    stop: int
    y: float = 0.0


def eviction_order(state: State) -> list[int]:
    """Return the ids of all nodes that can be evicted, in the order in which they would be.

    As SGLang does it: unlocked leaves, smallest key of ``state.eviction`` first; a parent that becomes a leaf joins them
    (docs/sglang.md 16, 17).
    """
    key = eviction_key(state.eviction)
    left = {node.id: len(node.children) for node in state.nodes.values()}
    heap = [(key(n), n.id) for n in state.nodes.values() if n.id != ROOT and not n.lock and not n.children]
    heapq.heapify(heap)
    out = []
    while heap:
        _, id = heapq.heappop(heap)
        out.append(id)
        parent = state.nodes[state.nodes[id].parent or ROOT]
        left[parent.id] -= 1
        if parent.id != ROOT and not parent.lock and not left[parent.id]:
            heapq.heappush(heap, (key(parent), parent.id))
    return out


def radix_tree(
    state: State | None,
    records: Records,
    *,
    selected: int | None = None,
    theme: Theme = "light",
    scale: float = 1.0,
    width: float = 500,
    span: int | None = None,
    max_leaves: int = MAX_LEAVES,
) -> go.Figure:
    """Draw the tree.

    Parameters
    ----------
    state : State or None
        the cache at one moment; None before there is one.
    records : Record, or dict of id to Record
        tell where tokens come from.
    selected : int, optional
        id of a node to be framed.
    theme, scale, width
        see `Frame`.
    span : int, optional
        tokens on the x axis, as in the ribbon; the deepest leaf by default.
    max_leaves : int
        of more leaves the last used are drawn, and the rest counted.

    Returns
    -------
    plotly Figure
        ``customdata`` of a bar is [node, start, stop].
    """
    frame = Frame(theme, scale, width)
    if state is None or len(state.nodes) < 2:
        return frame.empty(say.TREE, say.EMPTY_TREE if state is not None else say.EMPTY, 3 * frame.row)
    places, leaves = _layout(state, max_leaves)
    hidden = len(state.nodes) - 1 - len(places)
    stop = max(span or 0, *(p.stop for p in places.values()))
    rows = len(leaves) + (0.6 if hidden else 0)
    sheet = frame.sheet(say.TREE, _subtitle(state), max(rows, 2) * frame.row, x_title=say.TREE_X, left=14 * scale)
    pixels = max(width - 14 * scale - frame.right, 60) / stop
    step = max(1, round(tick_step(stop, stop * pixels, 70 * scale)))
    sheet.xaxis(range=[0, stop], dtick=step, tick0=0, tickformat=",d")
    sheet.yaxis(range=[max(rows, 2) - 0.5, -0.5], showticklabels=False)

    order = {id: place for place, id in enumerate(eviction_order(state), 1)}
    _connect(sheet, frame, state, places)
    cells = Cells(frame)
    known = listed(records)
    remembered = {record.id: sources(record) for record in known}
    for id, place in places.items():
        node, source = state.nodes[id], node_sources(state, id, place.start, known, remembered)
        facts, hue = _facts(node, order), SOURCES[source[0]] if source[0] >= 0 else None
        hover = say.HOVER_NODE.format(id=id, span=say.span(place.start, place.stop)) + "<br>" + " · ".join(facts)
        _node(cells, node, place, source, hover=hover, selected=id == selected)
        fill = frame.colours.hue(hue) if node.lock else frame.colours.faded(hue)
        if id in leaves:
            _end_label(sheet, frame, place, facts[1:])
            facts = facts[:1]
        _inner_label(sheet, frame, place, _fitting(facts, (place.stop - place.start) * pixels - 14 * scale, frame.small), fill)
    sheet.trace(cells.trace())
    if hidden:
        more = say.MORE_NODES.format(n=say.number(hidden), nodes=say.NODES[hidden > 1])
        font = {"size": frame.small, "color": frame.colours.mute}
        sheet.note(x=0, xanchor="left", y=rows - 0.7, text=more, font=font)
    return sheet.figure()


def summary(state: State | None) -> str:
    """Say in words how large the tree is and what would be evicted first."""
    if state is None or len(state.nodes) < 2:
        return say.EMPTY_TREE
    nodes = [n for n in state.nodes.values() if n.id != ROOT]
    order = eviction_order(state)
    return say.SUMMARY_TREE.format(
        nodes=say.count(len(nodes), *say.NODES),
        tokens=say.tokens(sum(len(n.tokens) for n in nodes)),
        locked=say.number(sum(n.lock > 0 for n in nodes)),
        next=say.SUMMARY_TREE_NEXT.format(id=order[0]) if order else say.SUMMARY_TREE_NONE,
    )


def table(state: State | None, records: Records) -> list[dict[str, Any]]:
    """Return the tree's nodes from the root down, a dict each."""
    if state is None:
        return []
    known = listed(records)
    order = {id: place for place, id in enumerate(eviction_order(state), 1)}
    out = []
    for id, start in depths(state):
        if id == ROOT:
            continue
        node = state.nodes[id]
        names = [SOURCES[s] if s >= 0 else "unknown" for s in dict.fromkeys(node_sources(state, id, start, known).tolist())]
        out.append(
            {
                say.COLUMN["node"]: id,
                say.COLUMN["parent"]: None if node.parent == ROOT else node.parent,
                say.COLUMN["first"]: start,
                say.COLUMN["last"]: start + len(node.tokens) - 1,
                say.COLUMN["tokens"]: len(node.tokens),
                say.COLUMN["source"]: ", ".join(say.SOURCE[name] for name in names),
                say.COLUMN["locks"]: node.lock,
                say.COLUMN["hits"]: node.hits,
                say.COLUMN["evicted"]: say.ordinal(order[id]) if id in order else None,
            }
        )
    return out


# ------------------------------------------------------------------ parts of the picture
def _layout(state: State, max_leaves: int) -> tuple[dict[int, _Place], list[int]]:
    """Give every leaf a row of its own, in the order of the tree, and every parent the middle of its children's."""
    starts = dict(depths(state))
    leaves = [id for id in starts if id != ROOT and not state.nodes[id].children]
    if len(leaves) > max_leaves:
        newest = sorted(leaves, key=lambda leaf: (state.nodes[leaf].lock, state.nodes[leaf].accessed))[-max_leaves:]
        leaves = [id for id in leaves if id in set(newest)]
    places: dict[int, _Place] = {}
    for row, leaf in enumerate(leaves):
        at: int | None = leaf
        while at is not None and at != ROOT and at not in places:
            places[at] = _Place(starts[at], starts[at] + len(state.nodes[at].tokens), row)
            at = state.nodes[at].parent
    for id in reversed([id for id in starts if id in places]):  # children before their parents
        below = [places[child].y for child in state.nodes[id].children if child in places]
        if below:
            places[id].y = (min(below) + max(below)) / 2
    return places, leaves


def _subtitle(state: State) -> str:
    nodes = len(state.nodes) - 1
    text = say.TREE_NODES_ONE if nodes == 1 else say.TREE_NODES
    return text.format(nodes=say.count(nodes, *say.NODES), tokens=say.tokens(sum(len(n.tokens) for n in state.nodes.values())))


def _connect(sheet: Sheet, frame: Frame, state: State, places: dict[int, _Place]) -> None:
    """Draw the stem from a node's end to its children, and the root's from 0."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for id, place in {ROOT: _Place(0, 0, -1), **places}.items():
        below = [places[child].y for child in state.nodes[id].children if child in places]
        if not below or (id == ROOT and len(below) < 2):
            continue
        ends = [*below, place.y] if id != ROOT else below
        xs += [place.stop, place.stop, None]
        ys += [min(ends), max(ends), None]
    line = {"color": frame.colours.mute, "width": 2 * frame.scale}
    sheet.trace(
        {
            "type": "scatter",
            "x": np.array(xs, float),
            "y": np.array(ys, float),
            "mode": "lines",
            "line": line,
            "hoverinfo": "skip",
            "cliponaxis": False,
        }
    )


def _node(cells: Cells, node: Node, place: _Place, source: np.ndarray, *, hover: str, selected: bool) -> None:
    """Draw a node as a bar in the hues of its tokens; its outline says that it is one."""
    edges = [0, *(np.flatnonzero(source[1:] != source[:-1]) + 1).tolist(), len(source)]
    frame, data = cells.frame, [node.id, place.start, place.stop]
    mark, height = "reused" if node.lock else "idle", frame.bar * 0.9
    for a, b in pairwise(edges):
        name = SOURCES[source[a]] if source[a] >= 0 else None
        cells.cell(place.start + a, place.start + b, place.y, height, mark=mark, source=name, hover=hover, data=data)
    edge, line = (frame.colours.ink, 3.0) if selected else (frame.colours.background, 1.5)
    cells.add(place.start, place.stop, place.y, height + 0.06, fill=CLEAR, edge=edge, line=line, hover=hover, data=data)


def _facts(node: Node, order: dict[int, int]) -> list[str]:
    """Return what a node's label says, the most important first."""
    out = [say.tokens(len(node.tokens))]
    if node.lock:
        out.append(say.LOCKED.format(n=say.number(node.lock)))
    elif node.id in order:
        out.append(say.EVICTED_PLACE.format(ordinal=say.ordinal(order[node.id])))
    return [*out, say.used(node.hits)]


def _end_label(sheet: Sheet, frame: Frame, place: _Place, facts: list[str]) -> None:
    """Say at the end of a leaf's row, where nothing else stands, when it would be evicted."""
    text = ", ".join(_fitting(facts, frame.right - 10 * frame.scale, frame.small, bold=False))
    font = {"size": frame.small, "color": frame.colours.ink}
    sheet.note(xref="paper", x=1, xanchor="left", xshift=8 * frame.scale, y=place.y, text=text, font=font)


def _inner_label(sheet: Sheet, frame: Frame, place: _Place, facts: list[str], fill: str) -> None:
    """Write `facts` into a bar."""
    if facts:
        text, font = f"<b>{' · '.join(facts)}</b>", {"size": frame.small, "color": frame.colours.on(fill)}
        sheet.note(x=place.start, xanchor="left", xshift=6 * frame.scale, y=place.y, text=text, font=font)


def _fitting(facts: list[str], pixels: float, size: float, *, bold: bool = True) -> list[str]:
    """Return as many of `facts`, from the first, as fit."""
    return next((facts[:n] for n in range(len(facts), 0, -1) if text_width(" · ".join(facts[:n]), size, bold=bold) <= pixels), [])
