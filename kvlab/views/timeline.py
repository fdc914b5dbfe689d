"""Where the time went: prefill and decode of every request, and as a ghost the prefill that caching removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from plotly.subplots import make_subplots

from kvlab.views import strings as say
from kvlab.views.frame import Cells, Frame, listed, tick_step
from kvlab.views.text import escape, fit, text_width

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import plotly.graph_objects as go

    from kvlab.trace.recorder import Record, Step
    from kvlab.views.palette import Theme

    Records = Mapping[str, Record] | Iterable[Record]

MAX_ROWS = 10
CUT, KEPT = 0.06, 0.015  # idle times longer than CUT of all work are shortened to KEPT of it


class _Span(NamedTuple):
    """One request on the time axis, in seconds; `prefill` and `decode` are what it says, the others where it stands."""

    id: str
    begin: float
    turn: float
    end: float
    prefill: float
    decode: float
    saved: float
    estimated: bool
    running: bool
    hover: tuple[str, str]


def timeline(
    records: Records,
    steps: Sequence[Step] = (),
    ghosts: Mapping[str, float] | None = None,
    *,
    theme: Theme = "light",
    scale: float = 1.0,
    width: float = 1010,
    title: str | None = None,
    max_rows: int = MAX_ROWS,
) -> go.Figure:
    """Draw when each request was prefilled and decoded.

    Parameters
    ----------
    records : Record, or dict of id to Record
        oldest first; of more than `max_rows` the last are drawn.
    steps : sequence of Step
        when the model worked: long idle times between are left out. Requests in a mixed step are hatched, as their split is
        estimated.
    ghosts : dict of id to float, optional
        seconds of prefill that caching removed, as the caller measured or estimated it.
    theme, scale, width
        see `Frame`.
    title : str, optional
        instead of "Time".
    max_rows : int
        rows at most.

    Returns
    -------
    plotly Figure
        ``customdata`` of a bar is [id].
    """
    frame = Frame(theme, scale, width)
    title = title or say.TIME
    rows = [r for r in listed(records) if r.started is not None]
    shown = rows[-max_rows:]
    if not shown:
        return frame.empty(title, say.EMPTY_TIME, 3 * frame.row)
    mixed = {id for step in steps if step.estimated for id in (*step.prefilled, *step.decoded)}
    clock = _Clock.of(shown, steps)
    spans = [_span(r, clock, (ghosts or {}).get(r.id, 0.0), estimated=r.estimated or r.id in mixed) for r in shown]
    subtitle = say.TIME_SUB if any(s.estimated for s in spans) else say.TIME_SUB_SHORT
    if len(rows) > len(shown):
        subtitle += " · " + say.MORE_REQUESTS.format(n=say.number(len(rows) - len(shown)))
    fig = frame.figure(title, subtitle, len(spans) * frame.row, x_title=say.TIME_X_CUT if clock.cuts else say.TIME_X,
                       y_title=say.RIBBON_Y, right=12 * scale)
    frame.rows(fig, [escape(fit(s.id, frame.left - 26 * scale, frame.small)) for s in spans])
    _draw(fig, frame, spans, frame.width - frame.left - 12 * scale)
    for cut in clock.cuts:
        fig.add_shape(type="line", x0=cut, x1=cut, yref="paper", y0=0, y1=1, layer="below",
                      line={"color": frame.colours.line, "width": 2 * scale, "dash": "dot"})
    return fig


def split_bars(
    records: Mapping[str, Records],
    ghosts: Mapping[str, Mapping[str, float]] | None = None,
    *,
    theme: Theme = "light",
    scale: float = 1.0,
    width: float = 1010,
    max_rows: int = 6,
) -> go.Figure:
    """Draw prefill and decode seconds of the same requests under several policies side by side, on one scale.

    Parameters
    ----------
    records : dict of policy to records
        a column a policy.
    ghosts : dict of policy to dict of id to float, optional
        seconds of prefill that caching removed.
    theme, scale, width
        see `Frame`.
    max_rows : int
        of more requests the last are drawn.
    """
    frame = Frame(theme, scale, width)
    columns = {p: [r for r in listed(of) if r.first_token is not None][-max_rows:] for p, of in records.items()}
    most = max((len(of) for of in columns.values()), default=0)
    if not most:
        return frame.empty(say.SPLIT, say.EMPTY_TIME, 3 * frame.row)
    base = frame.figure(say.SPLIT, say.TIME_SUB_SHORT, (most + 0.7) * frame.row, x_title=say.SPLIT_X, right=12 * scale)
    fig = make_subplots(rows=1, cols=len(columns), horizontal_spacing=frame.left / frame.width)
    layout = base.layout.to_plotly_json()
    x, y = layout.pop("xaxis"), layout.pop("yaxis")
    fig.update_layout(layout)
    fig.update_xaxes(x)
    fig.update_yaxes(y)
    plot = (frame.width - frame.left - 12 * scale - (len(columns) - 1) * frame.left) / len(columns)
    spans = {p: [_from_zero(r, (ghosts or {}).get(p, {}).get(r.id, 0.0)) for r in of] for p, of in columns.items()}
    reach = max(_reach(frame, of, plot) for of in spans.values() if of)
    for column, (policy, of) in enumerate(spans.items(), 1):
        at = {"row": 1, "col": column}
        fig.update_yaxes(range=[most - 0.5, -1.2], tickvals=list(range(len(of))), **at,
                         ticktext=[escape(fit(s.id, frame.left - 16 * scale, frame.small)) for s in of])
        _draw(fig, frame, of, plot, reach=reach, at=at)
        fig.add_annotation(x=0, xanchor="left", y=-0.85, text=f"<b>{say.POLICY[policy]}</b>", showarrow=False, **at,
                           font={"size": frame.normal, "color": frame.colours.ink})
    return fig


def summary(records: Records, ghosts: Mapping[str, float] | None = None) -> str:
    """Say in words what the timeline shows."""
    rows = [r for r in listed(records) if r.first_token is not None]
    if not rows:
        return say.EMPTY_TIME
    saved = {r.id: (ghosts or {}).get(r.id, 0.0) for r in rows}
    return " ".join(
        say.SUMMARY_TIME.format(id=r.id, prefill=say.seconds(r.prefill_seconds), decode=say.seconds(r.decode_seconds),
                                saved=say.SUMMARY_SAVED.format(time=say.seconds(saved[r.id])) if saved[r.id] > 0 else "")
        for r in rows
    )


def table(records: Records, ghosts: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
    """Return the times in seconds, a dict a request."""
    return [
        {
            say.COLUMN["request"]: r.id,
            say.COLUMN["prefill"]: None if r.first_token is None else round(r.prefill_seconds, 4),
            say.COLUMN["decode"]: None if r.first_token is None else round(r.decode_seconds, 4),
            say.COLUMN["ttft"]: None if r.first_token is None else round(r.first_token - r.submitted, 4),
            say.COLUMN["saved"]: round(ghosts[r.id], 4) if ghosts and r.id in ghosts else None,
            say.COLUMN["outcome"]: None if r.outcome is None else say.OUTCOME.get(r.outcome, r.outcome),
        }
        for r in listed(records)
    ]


def split_table(records: Mapping[str, Records], ghosts: Mapping[str, Mapping[str, float]] | None = None) -> list[dict[str, Any]]:
    """Return the times of several policies, a dict a policy and request."""
    return [{say.COLUMN["policy"]: say.POLICY[p], **row} for p, of in records.items() for row in table(of, (ghosts or {}).get(p))]


# ------------------------------------------------------------------ the axis
@dataclass(frozen=True)
class _Clock:
    """Turns the trace's seconds into places on the axis, where long idle times are left out."""

    real: np.ndarray
    axis: np.ndarray
    cuts: tuple[float, ...]
    now: float

    @classmethod
    def of(cls, records: Sequence[Record], steps: Sequence[Step]) -> _Clock:
        """Build it from the times at which anything happened."""
        busy = sorted([*((s.begin, s.end) for s in steps), *((r.started, _end(r)) for r in records if r.started is not None)])
        first = min(r.started for r in records if r.started is not None)
        busy = [(max(a, first), b) for a, b in busy if b >= first]
        merged = [list(busy[0])]
        for a, b in busy[1:]:
            if a <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], b)
            else:
                merged.append([a, b])
        work = sum(b - a for a, b in merged) or 1.0
        real, axis, cuts, at = [merged[0][0]], [0.0], [], 0.0
        for i, (a, b) in enumerate(merged):
            if i:
                gap = a - merged[i - 1][1]
                kept = KEPT * work if gap > CUT * work else gap
                if kept < gap:
                    cuts.append(at + kept / 2)
                at += kept
                real.append(a)
                axis.append(at)
            at += b - a
            real.append(b)
            axis.append(at)
        return cls(np.array(real), np.array(axis), tuple(cuts), merged[-1][1])

    def at(self, seconds: float) -> float:
        return float(np.interp(seconds, self.real, self.axis))


def _end(record: Record) -> float:
    times = [record.started, record.first_token, record.finished]
    known = [t for t in times if t is not None]
    return max(known) if record.finished is not None or record.first_token is None else max(known[-1], known[-1] + record.decode_seconds)


def _span(record: Record, clock: _Clock, saved: float, *, estimated: bool) -> _Span:
    begin = clock.at(record.started or 0.0)
    turn = clock.at(record.first_token if record.first_token is not None else clock.now)
    end = clock.at(_end(record)) if record.first_token is not None else turn
    return _Span(record.id, begin, turn, max(end, turn), record.prefill_seconds if record.first_token is not None else turn - begin,
                 record.decode_seconds, max(saved, 0.0), estimated,
                 record.first_token is None, _hover(record))


def _from_zero(record: Record, saved: float) -> _Span:
    turn = record.prefill_seconds
    return _Span(record.id, 0.0, turn, turn + record.decode_seconds, turn, record.decode_seconds, max(saved, 0.0),
                 estimated=record.estimated, running=False, hover=_hover(record))


def _hover(record: Record) -> tuple[str, str]:
    id = escape(record.id)
    first = say.HOVER_TIME.format(id=id, phase=say.PREFILL, time=say.seconds(record.prefill_seconds))
    second = say.HOVER_TIME.format(id=id, phase=say.DECODE, time=say.seconds(record.decode_seconds))
    if record.first_token is not None:
        first += "<br>" + say.HOVER_TTFT.format(time=say.seconds(record.first_token - record.submitted))
        if record.output_tokens > 1:
            second += "<br>" + say.HOVER_TPOT.format(time=say.seconds(record.decode_seconds / (record.output_tokens - 1)))
    return first, second


# ------------------------------------------------------------------ the rows
def _labels(frame: Frame, span: _Span, pixels: float) -> tuple[bool, str]:
    """Return whether prefill and decode each hold their time, and what stands behind the row otherwise."""
    size = frame.small
    room = 8 * frame.scale
    if span.running:
        return False, say.PREFILLING
    fits = all(
        not seconds or text_width(say.seconds(seconds), size, bold=True) + room <= length * pixels
        for seconds, length in ((span.prefill, span.turn - span.begin), (span.decode, span.end - span.turn))
    )
    behind = [] if fits else [say.TIME_LABEL.format(prefill=say.seconds(span.prefill), decode=say.seconds(span.decode))]
    if span.saved and text_width(say.SAVED.format(time=say.seconds(span.saved)), size) + room > span.saved * pixels:
        behind.append(say.SAVED.format(time=say.seconds(span.saved)))
    return fits, " · ".join(behind)


def _reach(frame: Frame, spans: list[_Span], plot: float) -> float:
    """Return the seconds that the axis must reach for every bar, ghost and label to stand inside."""
    longest = max(s.end + s.saved for s in spans) or 1.0
    reach = longest
    for _ in range(4):  # a longer axis makes bars shorter, so that more labels move behind them
        pixels = plot / reach
        wanted = longest
        for span in spans:
            _, behind = _labels(frame, span, pixels)
            if behind:
                label = text_width(behind, frame.small) + 14 * frame.scale
                wanted = max(wanted, (span.end + span.saved) / max(1 - label / plot, 0.2))
        if wanted <= reach:
            break
        reach = wanted
    return reach * 1.005


def _draw(
    fig: go.Figure, frame: Frame, spans: list[_Span], plot: float, *, reach: float | None = None, at: dict[str, int] | None = None
) -> None:
    """Draw rows of bars into a figure, or into the subplot `at`."""
    at = at or {}
    if not spans:
        return
    c, height = frame.colours, frame.bar * 0.85
    reach = reach or _reach(frame, spans, plot)
    pixels = plot / reach
    fig.update_xaxes(range=[0, reach], dtick=tick_step(reach, plot, 80 * frame.scale), tick0=0, **at)
    cells = Cells(frame)
    for y, span in enumerate(spans):
        data = [span.id]
        hatch = "/" if span.estimated else ""
        cells.add(span.begin, span.turn, y, height, c.prefill, hatch=hatch, hover=span.hover[0], data=data)
        cells.add(span.turn, span.end, y, height, c.hue("generated"), hatch=hatch, hover=span.hover[1], data=data)
        fits, behind = _labels(frame, span, pixels)
        if fits:
            for seconds, a, b, fill in ((span.prefill, span.begin, span.turn, c.prefill), (span.decode, span.turn, span.end, c.hue("generated"))):
                if seconds:
                    plate = {"bgcolor": fill, "borderpad": 1} if hatch else {}  # hatching would run through the digits
                    _text(fig, frame, (a + b) / 2, y, f"<b>{say.seconds(seconds)}</b>", c.on(fill), at, **plate)
        if span.saved:
            a, b = span.end + 3 / pixels, span.end + span.saved
            if b > a:
                ghost = {"color": c.mute, "width": 1.5 * frame.scale, "dash": "dash"}
                fig.add_shape(type="rect", x0=a, x1=b, y0=y - height / 2, y1=y + height / 2, line=ghost, fillcolor="rgba(0,0,0,0)", **at)
            saved = say.SAVED.format(time=say.seconds(span.saved))
            if saved not in behind:
                _text(fig, frame, (a + b) / 2, y, saved, c.mute, at)
        if behind:
            _text(fig, frame, span.end + span.saved, y, behind, c.ink, at, xanchor="left", xshift=6 * frame.scale)
    fig.add_trace(cells.trace(), **at)


def _text(fig: go.Figure, frame: Frame, x: float, y: float, text: str, colour: str, at: dict[str, int], **more: Any) -> None:  # noqa: ANN401
    fig.add_annotation(x=x, y=y, text=text, showarrow=False, font={"size": frame.small, "color": colour}, **more, **at)
