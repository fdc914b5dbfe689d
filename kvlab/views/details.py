"""What one block, page or radix node holds: the card beside a chart, asked for when somebody selects it."""

from __future__ import annotations

import html as _html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvlab.prompts import SOURCES
from kvlab.views import strings as say
from kvlab.views.frame import FONT, listed
from kvlab.views.ownership import STATES, depths, holders, idle_order, node_sources, units
from kvlab.views.palette import Theme, palette
from kvlab.views.radix_tree import eviction_order
from kvlab.views.text import excerpt, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvlab.cache.state import State
    from kvlab.trace.recorder import Record

    Records = Mapping[str, Record] | Iterable[Record]
    Texts = Mapping[str, Sequence[str]]

EXCERPT = 120  # characters


@dataclass(frozen=True)
class Details:
    """A title, facts, and the text that stands there as it was typed (white space made visible)."""

    title: str
    facts: list[str] = field(default_factory=list)
    text: str = ""

    def html(self, theme: Theme = "light", scale: float = 1.0) -> str:
        """Return it as an HTML card, escaped."""
        c = palette(theme)
        style = (
            f"background:{c.panel};border:1px solid {c.line};border-radius:8px;padding:{8 * scale:g}px {12 * scale:g}px;"
            f"color:{c.ink};font:{13 * scale:g}px/1.5 {_html.escape(FONT)}"
        )
        facts = _html.escape(" · ".join(self.facts))
        typed = f"<div>{_html.escape(say.HOVER_TEXT.format(text=self.text))}</div>" if self.text else ""
        return (
            f'<div class="kvlab-details tex2jax_ignore mathjax_ignore" style="{style}"><b>{_html.escape(self.title)}</b>'
            f'<div style="color:{c.mute}">{facts}</div>{typed}</div>'
        )


def unit_details(state: State, records: Records, unit: int, texts: Texts | None = None) -> Details:
    """Describe block or page `unit`: its tokens, key, holders and place in the queue.

    Raises
    ------
    ValueError
        for a unit that the pool does not have.
    """
    known = listed(records)
    pool = units(state, known)
    name = (say.SLOT if state.unit == 1 else say.UNIT[state.policy])[0].capitalize()
    if not 0 <= unit < len(pool.state):
        msg = f"{name.lower()} {unit} does not exist: this pool's are 0 to {len(pool.state) - 1}."
        raise ValueError(msg)
    title = [say.DETAIL_BLOCK.format(name=name, id=say.number(unit))]
    kind = STATES[pool.state[unit]]
    if kind == "null":
        return Details(title[0], [say.HOVER_NULL.format(name=name)])
    if kind == "free":
        return Details(title[0], [say.DETAIL_FREE])
    held = holders(state, unit)
    start = int(pool.position[unit])
    stop = max([stop for _, stop in held.values()] or [start + state.unit])
    title += [say.span(start, stop), _source(int(pool.source[unit]))]
    facts = []
    block = state.blocks.get(unit)
    if block:
        key, parent = _short(block.hash), None if block.parent is None else _short(block.parent)
        facts.append(say.DETAIL_FIRST.format(key=key) if parent is None else say.DETAIL_PARENT.format(key=key, parent=parent))
    if held:
        facts.append(say.DETAIL_USED.format(ids=", ".join(held)))
    elif block:
        facts.append(say.DETAIL_PLACE.format(ordinal=say.ordinal(idle_order(state).index(unit) + 1)))
    else:
        facts.append(say.STATE[kind])
    at = _owner(known, list(block.tokens) if block else None, start, next(iter(held), None))
    return Details(" · ".join(title), facts, _typed(texts, at, start, stop))


def node_details(state: State, records: Records, node: int, texts: Texts | None = None) -> Details:
    """Describe a radix node: its tokens, locks, use and place in the queue.

    Raises
    ------
    ValueError
        for a node that the tree does not have.
    """
    if node not in state.nodes:
        msg = f"node {node} is not in the tree: it was evicted, or never there."
        raise ValueError(msg)
    known = listed(records)
    start = next(at for id, at in depths(state) if id == node)
    it = state.nodes[node]
    stop = start + len(it.tokens)
    names = [_source(int(s)) for s in dict.fromkeys(node_sources(state, node, start, known).tolist())]
    order = eviction_order(state)
    state_of = say.LOCKED.format(n=say.number(it.lock))
    if node in order:
        state_of = say.EVICTED_PLACE.format(ordinal=say.ordinal(order.index(node) + 1))
    last = say.DETAIL_LAST_USE.format(tick=say.number(it.accessed), made=say.number(it.created))
    facts = [say.tokens(len(it.tokens)), state_of, say.used(it.hits), last]
    name = say.DETAIL_BLOCK.format(name=say.NODES[0].capitalize(), id=say.number(node))
    title = [name, say.span(start, stop), ", ".join(names)]
    return Details(" · ".join(title), facts, _typed(texts, _owner(known, it.tokens, start, None), start, stop))


def _source(index: int) -> str:
    return say.SOURCE[SOURCES[index] if index >= 0 else "unknown"]


def _short(key: int) -> str:
    """Return the two ends of a 64-bit key: c4e1…9a."""
    digits = f"{key & np.iinfo(np.uint64).max:016x}"
    return f"{digits[:4]}…{digits[-2:]}"


def _owner(records: Sequence[Record], tokens: list[int] | None, start: int, holder: str | None) -> str | None:
    """Return the id of a request whose text stands there."""
    if holder is not None:
        return holder
    return next((r.id for r in reversed(records) if tokens and r.tokens[start : start + len(tokens)] == tokens), None)


def _typed(texts: Texts | None, id: str | None, start: int, stop: int) -> str:
    return visible(excerpt("".join((texts or {}).get(id or "", ())[start:stop]), EXCERPT))
