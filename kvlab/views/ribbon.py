"""The prompt ribbon: a row a request, a cell a token, drawn as runs; where the match ends, under the engine's own grid."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.views import strings as say
from kvlab.views.frame import Cells, Frame, listed, tick_step
from kvlab.views.summary import sentence, unadmitted
from kvlab.views.text import escape, excerpt, fit, show, text_width, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import plotly.graph_objects as go

    from kvlab.cache.state import State
    from kvlab.trace.recorder import Record
    from kvlab.views.palette import Theme
    from kvlab.views.sheet import Sheet

    Records = Mapping[str, Record] | Iterable[Record]
    Texts = Mapping[str, Sequence[str]]

TOKEN_PIXELS = 13  # at least so wide must a token be to get a cell of its own
GRID_PIXELS = 5  # and a unit, to get its line through the bars
MAX_ROWS = 8


def prompt_ribbon(
    records: Records,
    unit: int,
    *,
    policy: str,
    theme: Theme = "light",
    scale: float = 1.0,
    width: float = 1010,
    span: int | None = None,
    window: tuple[int, int] | None = None,
    texts: Texts | None = None,
    state: State | None = None,
    selected: Mapping[str, tuple[int, int]] | None = None,
    max_rows: int = MAX_ROWS,
) -> go.Figure:
    """Draw the prompts and answers of `records` along their tokens.

    Parameters
    ----------
    records : Record, or dict of id to Record
        oldest first; of more than `max_rows` the last are drawn.
    unit : int
        tokens in a block or page: the grid.
    policy : {"vllm", "sglang", "none"}
        whose words to use.
    theme, scale, width
        see `Frame`; a scale of 1.5 is the projector's.
    span : int, optional
        tokens on the x axis, so that several ribbons and the radix tree stand under one grid; the longest request by default.
    window : (start, stop), optional
        zoom into these token positions; a short one shows the text of every token.
    texts : dict of id to list of str, optional
        text of each token, as typed; it is escaped here.
    state : State, optional
        tells how far running requests have been computed.
    selected : dict of id to (start, stop), optional
        token positions to be framed, as ``ownership.holders`` gives them.

    Returns
    -------
    plotly Figure
        ``customdata`` of a cell is [id, start, stop].
    """
    rows = listed(records)
    shown = rows[-max_rows:]
    frame = Frame(theme, scale, width)
    title = say.POLICY[policy]
    subtitle = say.RIBBON_NONE if policy == "none" else say.RIBBON_MATCHES.format(units=say.units(policy, unit))
    if not shown:
        return frame.empty(title, say.EMPTY, 3 * frame.row)
    if len(rows) > len(shown):
        subtitle += " · " + say.MORE_REQUESTS.format(n=say.number(len(rows) - len(shown)))
    sheet = frame.sheet(title, subtitle, len(shown) * frame.row, x_title=say.RIBBON_X, y_title=say.RIBBON_Y)
    frame.rows(sheet, [escape(fit(r.id, frame.left - 26 * scale, frame.small)) for r in shown])
    start, stop = window or (0, max(span or 0, *(len(r.tokens) for r in shown), 1))
    ruler = _Ruler(frame, start, stop, unit, policy)
    _grid(sheet, ruler)

    cells = Cells(frame)
    framed = selected or {}
    for y, record in enumerate(shown):
        text = (texts or {}).get(record.id, ())
        for a, b in _runs(record, ruler, _written(record, state)):
            mark, source = _mark(record, a, state), record.source(a)
            hover = _hover(record, a, b, mark, ruler, "".join(text[a:b]))
            cells.cell(a, b, y, frame.bar, mark=mark, source=source, hover=hover, data=[record.id, a, b])
            if ruler.single and a < len(text):
                _token_text(sheet, ruler, (a, y), text[a], mark=mark, source=source)
        if record.cached_tokens is None:
            row = (min(stop, len(record.tokens)) - start) * ruler.per_token
            room = max(row, frame.plot + frame.right - row) - 16 * scale  # in the row, or behind it
            _note(sheet, ruler, (start, y), record, fit(unadmitted(record), room, frame.small))
            continue
        _end_label(sheet, frame, y, record)
        if not (text and ruler.single):  # the cells are full of text already
            _hit_label(sheet, ruler, y, record, framed.get(record.id))
    sheet.trace(cells.trace())
    _unit_lines(sheet, ruler, shown)
    for y, record in enumerate(shown):
        _boundary(sheet, ruler, y, record, framed.get(record.id))
    return sheet.figure()


def summary(records: Records, unit: int, *, policy: str, instead_of: Mapping[str, float] | None = None) -> str:
    """Say in words what the ribbon shows."""
    rows = listed(records)
    if not rows:
        return say.EMPTY
    matches = say.RIBBON_NONE if policy == "none" else say.RIBBON_MATCHES.format(units=say.units(policy, unit))
    out = [f"{say.POLICY[policy]} {matches}."]
    out += [say.SUMMARY_ROW.format(id=r.id, sentence=sentence(r, (instead_of or {}).get(r.id))) for r in rows]
    return " ".join(out)


def table(records: Records, unit: int, *, policy: str, texts: Texts | None = None) -> list[dict[str, Any]]:
    """Return the ribbon's numbers, a dict a request; texts are as typed, white space made visible (`tables.html` escapes)."""
    out = []
    for r in listed(records):
        hit = r.cached_tokens
        row: dict[str, Any] = {
            say.COLUMN["request"]: r.id,
            say.COLUMN["prompt"]: r.prompt_tokens,
            say.COLUMN["reused"]: hit,
            say.COLUMN["computed"]: None if hit is None else r.prompt_tokens - hit,
            say.COLUMN["output"]: r.output_tokens,
            say.COLUMN["stopped"]: None if r.stopped is None else say.STOPPED[r.stopped].format(unit=say.unit(policy, unit)),
            say.COLUMN["prefill"]: None if r.first_token is None else round(r.prefill_seconds, 4),
            say.COLUMN["decode"]: None if r.first_token is None else round(r.decode_seconds, 4),
            say.COLUMN["outcome"]: None if r.outcome is None else say.OUTCOME.get(r.outcome, r.outcome),
        }
        if texts is not None:
            row[say.COLUMN["after"]] = visible(excerpt("".join(texts.get(r.id, ())[hit or 0 :][:24]), 40))
        out.append(row)
    return out


def token_table(
    record: Record, unit: int, *, policy: str, texts: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> list[dict[str, Any]]:
    """Return tokens [start, stop) of one request, a dict each: position, block or page, id, text, source and state."""
    return [
        {
            say.COLUMN["position"]: i,
            say.UNIT[policy][0]: i // unit,
            say.COLUMN["id"]: record.tokens[i],
            say.COLUMN["text"]: visible(texts[i]) if texts and i < len(texts) else None,
            say.COLUMN["source"]: say.SOURCE[record.source(i)],
            say.COLUMN["state"]: say.MARK[_mark(record, i, None)],
        }
        for i in range(start, len(record.tokens) if stop is None else min(stop, len(record.tokens)))
    ]


def window_around(position: int, *, width: float = 1010, scale: float = 1.0) -> tuple[int, int]:
    """Return the window around a token position in which every token has room for its text."""
    half = max(2, int(Frame("light", scale, width).plot / (54 * scale)) // 2)
    return max(0, position - half), max(0, position - half) + 2 * half


# ------------------------------------------------------------------ parts of the picture
@dataclass(frozen=True)
class _Ruler:
    """The x axis: tokens [start, stop) on the frame's width, cut into units."""

    frame: Frame
    start: int
    stop: int
    unit: int
    policy: str

    @property
    def per_token(self) -> float:
        """Pixels of a token."""
        return self.frame.plot / (self.stop - self.start)

    @property
    def single(self) -> bool:
        """Every token gets a cell of its own."""
        return self.per_token >= TOKEN_PIXELS * self.frame.scale


def _written(record: Record, state: State | None) -> int:
    """Return how many tokens of a request have their K/V: all, unless `state` knows better."""
    if record.cached_tokens is None:
        return 0
    row = state.rows.get(record.id) if state else None
    return row.written if row and row.running and record.first_token is None else len(record.tokens)


def _mark(record: Record, position: int, state: State | None) -> str:
    if record.cached_tokens is not None and position < record.cached_tokens:
        return "reused"
    return "computed" if position < _written(record, state) else "pending"


def _runs(record: Record, ruler: _Ruler, written: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches in sight whose cells look alike; single tokens where each gets a cell."""
    start, stop = ruler.start, min(ruler.stop, len(record.tokens))
    if ruler.single:
        yield from ((i, i + 1) for i in range(start, stop))
        return
    cuts = {start, stop, record.prompt_tokens, record.cached_tokens or 0, written}
    cuts |= {edge for part in record.parts for edge in (part.start, part.stop)}
    yield from pairwise(sorted(cut for cut in cuts if start <= cut <= stop))


def _hover(record: Record, a: int, b: int, mark: str, ruler: _Ruler, typed: str) -> str:  # noqa: PLR0917 - what a cell is
    words = {"id": escape(record.id), "source": say.SOURCE[record.source(a)], "mark": say.MARK[mark]}
    if b - a == 1:
        out = say.HOVER_ONE.format(position=say.number(a), **words)
        if ruler.unit > 1:
            out += "<br>" + say.HOVER_BLOCK.format(unit=say.UNIT[ruler.policy][0], block=say.number(a // ruler.unit))
    else:
        out = say.HOVER_RUN.format(span=say.span(a, b), **words)
    return out + "<br>" + say.HOVER_TEXT.format(text=show(excerpt(typed))) if typed else out


def _grid(sheet: Sheet, ruler: _Ruler) -> None:
    """Label the x axis in round numbers; a small tick at every unit says how long the engine's ruler is."""
    frame, span = ruler.frame, ruler.stop - ruler.start
    step = max(1, round(tick_step(span, frame.plot, 70 * frame.scale)))
    minor = ruler.unit if ruler.unit > 1 or ruler.per_token >= 4 else step  # ticks of one token each would be a black band
    while minor * ruler.per_token < 3:
        minor *= 2
    ticks = {"dtick": minor, "tick0": 0, "ticks": "outside", "ticklen": 4 * frame.scale, "tickcolor": frame.colours.mute}
    sheet.xaxis(range=[ruler.start, ruler.stop], dtick=step, tick0=0, tickformat=",d", minor=ticks)


def _unit_lines(sheet: Sheet, ruler: _Ruler, shown: list[Record]) -> None:
    """Cut the bars at every unit, as the engine does, where the lines would not blot them out."""
    unit, scale = ruler.unit, ruler.frame.scale
    if unit * ruler.per_token < GRID_PIXELS * scale or (unit == 1 and not ruler.single):
        return
    xs: list[float | None] = []
    ys: list[float | None] = []
    half = ruler.frame.bar / 2
    for y, record in enumerate(shown):
        if record.cached_tokens is None:
            continue
        for x in range(-(-ruler.start // unit) * unit, min(ruler.stop, len(record.tokens)) + 1, unit):
            xs += [x, x, None]
            ys += [y - half if x <= record.cached_tokens else y, y + half, None]
    line = {"color": ruler.frame.colours.background, "width": 1 if unit > 1 else 2}
    lines = {"x": np.array(xs, np.float32), "y": np.array(ys, np.float32), "mode": "lines", "line": line}
    sheet.trace({"type": "scatter", **lines, "hoverinfo": "skip"})


def _boundary(sheet: Sheet, ruler: _Ruler, y: int, record: Record, framed: tuple[int, int] | None) -> None:
    """Draw the line where the match ends, and the frame around what is selected."""
    c, scale, hit = ruler.frame.colours, ruler.frame.scale, record.cached_tokens
    if hit and ruler.start < hit <= ruler.stop:
        sheet.shape(type="line", x0=hit, x1=hit, y0=y - 0.48, y1=y + 0.48, line={"color": c.ink, "width": 3 * scale})
    if framed and framed[0] < ruler.stop and framed[1] > ruler.start:
        a, b = max(framed[0], ruler.start), min(framed[1], ruler.stop)
        sheet.shape(type="rect", x0=a, x1=b, y0=y - 0.44, y1=y + 0.44, line={"color": c.ink, "width": 2.5 * scale})


def _end_label(sheet: Sheet, frame: Frame, y: int, record: Record) -> None:
    """Say at the end of the row how much was computed, and how long that took."""
    text = say.COMPUTED.format(n=say.number(record.prompt_tokens - (record.cached_tokens or 0)))
    if record.first_token is not None:
        text = say.RIBBON_END.format(computed=text, seconds=say.seconds(record.prefill_seconds))
    text, font = fit(text, frame.right - 10 * frame.scale, frame.small), {"size": frame.small, "color": frame.colours.ink}
    sheet.note(xref="paper", x=1, xanchor="left", xshift=8 * frame.scale, y=y, text=text, font=font)


def _hit_label(sheet: Sheet, ruler: _Ruler, y: int, record: Record, framed: tuple[int, int] | None) -> None:
    """Say how much was reused beside the line where the match ends."""
    frame, hit = ruler.frame, record.cached_tokens or 0
    if not ruler.start <= hit <= ruler.stop:
        return
    label = say.REUSED.format(n=say.number(hit)) if hit else say.NOTHING_REUSED
    at = framed[0] if framed and framed[0] < hit <= framed[1] else hit  # beside what is selected, not over it
    if not hit or text_width(label, frame.small, bold=True) + 14 * frame.scale > (at - ruler.start) * ruler.per_token:
        _note(sheet, ruler, (hit, y), record, label)
        return
    begin = int(at - text_width(label, frame.small, bold=True) / ruler.per_token - 14 * frame.scale / ruler.per_token)
    alone = len({record.source(i) for i in range(max(begin, 0), at)}) == 1
    plate = frame.colours.hue(record.source(hit - 1)) if alone else frame.colours.background
    high = (frame.row * frame.bar - frame.small * 1.4) / 2 - 1  # as high as the bar, to keep the grid out of the words
    sheet.note(
        x=at,
        xanchor="right",
        xshift=-2 * frame.scale,
        y=y,
        text=f"<b>{label}</b>",
        font={"size": frame.small, "color": frame.colours.on(plate)},
        bgcolor=plate,
        borderpad=high if alone else frame.scale,  # but never over the hues of other sources
    )


def _note(sheet: Sheet, ruler: _Ruler, at: tuple[float, int], record: Record, text: str) -> None:
    """Write into the empty upper half of the cells from `at` on, or behind a row that is too short for that."""
    frame, (x, y) = ruler.frame, at
    end = min(len(record.tokens), ruler.stop)
    reach = x + (text_width(text, frame.small) + 10 * frame.scale) / ruler.per_token
    inside = reach <= end
    crosses = inside and any(x < edge < reach for part in record.parts for edge in (part.start, part.stop))
    sheet.note(
        x=x if inside else end,
        xanchor="left",
        xshift=4 * frame.scale,
        y=y - frame.bar / 4 if inside else y,
        text=escape(text),
        font={"size": frame.small, "color": frame.colours.ink},
        bgcolor=frame.colours.background if crosses else None,  # no edge runs through the words
        borderpad=0,
    )


def _token_text(sheet: Sheet, ruler: _Ruler, at: tuple[int, int], text: str, *, mark: str, source: str) -> None:
    """Write a token's text into its cell: over the fill where it was reused, else into the empty upper half."""
    frame, (x, y) = ruler.frame, at
    shown = fit(visible(text), ruler.per_token - 4 * frame.scale, frame.small)
    c = frame.colours
    font = {"size": frame.small, "color": c.on(c.hue(source)) if mark == "reused" else c.ink}
    above = y - frame.bar / 4 if mark == "computed" else y
    if shown:
        sheet.note(x=x + 0.5, y=above, text=escape(shown), borderpad=0, font=font)
