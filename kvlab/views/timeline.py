"""Where the time went: prefill and decode of every request, and as a ghost the prefill that caching removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvlab.views import strings as say
from kvlab.views.clock import Clock, ended
from kvlab.views.frame import CLEAR, Cells, Frame, listed, tick_step
from kvlab.views.text import escape, fit, text_width

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import plotly.graph_objects as go

    from kvlab.trace.recorder import Record, Step
    from kvlab.views.palette import Theme
    from kvlab.views.sheet import Sheet

    Records = Mapping[str, Record] | Iterable[Record]

MAX_ROWS = 10


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
    clock = Clock.of(shown, steps)
    spans = [_span(r, clock, (ghosts or {}).get(r.id, 0.0), estimated=r.estimated or r.id in mixed) for r in shown]
    subtitle = say.TIME_SUB if any(s.estimated for s in spans) else say.TIME_SUB_SHORT
    if len(rows) > len(shown):
        subtitle += " · " + say.MORE_REQUESTS.format(n=say.number(len(rows) - len(shown)))
    sheet = frame.sheet(
        title,
        subtitle,
        len(spans) * frame.row,
        x_title=say.TIME_X_CUT if clock.cuts else say.TIME_X,
        y_title=say.RIBBON_Y,
        right=12 * scale,
    )
    frame.rows(sheet, [escape(fit(s.id, frame.left - 26 * scale, frame.small)) for s in spans])
    _draw(sheet, frame, spans, frame.width - frame.left - 12 * scale)
    for cut in clock.cuts:
        sheet.shape(
            type="line",
            x0=cut,
            x1=cut,
            yref="paper",
            y0=0,
            y1=1,
            layer="below",
            line={"color": frame.colours.line, "width": 2 * scale, "dash": "dot"},
        )
    return sheet.figure()


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
    height = (most + 0.7) * frame.row
    sheet = frame.sheet(say.SPLIT, say.TIME_SUB_SHORT, height, x_title=say.SPLIT_X, y_title=say.RIBBON_Y, right=12 * scale)
    whole = frame.width - frame.left - 12 * scale
    sheet.split(len(columns), frame.left / whole)
    plot = (whole - (len(columns) - 1) * frame.left) / len(columns)
    spans = {p: [_from_zero(r, (ghosts or {}).get(p, {}).get(r.id, 0.0)) for r in of] for p, of in columns.items()}
    reach = max(_reach(frame, of, plot) for of in spans.values() if of)
    for column, (policy, of) in enumerate(spans.items()):
        sheet.yaxis(
            range=[most - 0.5, -1.2],
            tickvals=list(range(len(of))),
            column=column,
            ticktext=[escape(fit(s.id, frame.left - 16 * scale, frame.small)) for s in of],
        )
        _draw(sheet, frame, of, plot, reach=reach, column=column)
        sheet.note(
            x=0,
            xanchor="left",
            y=-0.85,
            text=f"<b>{say.POLICY[policy]}</b>",
            column=column,
            font={"size": frame.normal, "color": frame.colours.ink},
        )
    return sheet.figure()


def summary(records: Records, ghosts: Mapping[str, float] | None = None) -> str:
    """Say in words what the timeline shows."""
    rows = [r for r in listed(records) if r.first_token is not None]
    if not rows:
        return say.EMPTY_TIME
    saved = {r.id: (ghosts or {}).get(r.id, 0.0) for r in rows}
    return " ".join(
        say.SUMMARY_TIME.format(
            id=r.id,
            prefill=say.seconds(r.prefill_seconds),
            decode=say.seconds(r.decode_seconds),
            saved=say.SUMMARY_SAVED.format(time=say.seconds(saved[r.id])) if saved[r.id] > 0 else "",
        )
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


# ------------------------------------------------------------------ the rows
def _span(record: Record, clock: Clock, saved: float, *, estimated: bool) -> _Span:
    begin, running = clock.at(record.started or 0.0), record.first_token is None
    turn = clock.at(clock.now if record.first_token is None else record.first_token)
    end = turn if running else max(turn, clock.at(ended(record)))
    prefill = turn - begin if running else record.prefill_seconds
    return _Span(record.id, begin, turn, end, prefill, record.decode_seconds, max(saved, 0.0), estimated, running, _hover(record))


def _from_zero(record: Record, saved: float) -> _Span:
    prefill, decode = record.prefill_seconds, record.decode_seconds
    end = prefill + decode
    hover = _hover(record)
    return _Span(record.id, 0.0, prefill, end, prefill, decode, max(saved, 0.0), record.estimated, running=False, hover=hover)


def _hover(record: Record) -> tuple[str, str]:
    id = escape(record.id)
    first = say.HOVER_TIME.format(id=id, phase=say.PREFILL, time=say.seconds(record.prefill_seconds))
    second = say.HOVER_TIME.format(id=id, phase=say.DECODE, time=say.seconds(record.decode_seconds))
    if record.first_token is not None:
        first += "<br>" + say.HOVER_TTFT.format(time=say.seconds(record.first_token - record.submitted))
        if record.output_tokens > 1:
            second += "<br>" + say.HOVER_TPOT.format(time=say.seconds(record.decode_seconds / (record.output_tokens - 1)))
    return first, second


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
    if span.saved and not _ghost_fits(frame, span, pixels):
        behind.append(say.SAVED.format(time=say.seconds(span.saved)))
    return fits, " · ".join(behind)


def _ghost_fits(frame: Frame, span: _Span, pixels: float) -> bool:
    text = say.SAVED.format(time=say.seconds(span.saved))
    return text_width(text, frame.small) + 8 * frame.scale <= span.saved * pixels


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


def _draw(sheet: Sheet, frame: Frame, spans: list[_Span], plot: float, *, reach: float | None = None, column: int = 0) -> None:
    """Draw rows of bars into a figure, or into one column of it."""
    if not spans:
        return
    reach = reach or _reach(frame, spans, plot)
    pixels = plot / reach
    sheet.xaxis(range=[0, reach], dtick=tick_step(reach, plot, 80 * frame.scale), tick0=0, column=column)
    c, height = frame.colours, frame.bar * 0.85
    cells = Cells(frame)
    for y, span in enumerate(spans):
        fits, behind = _labels(frame, span, pixels)
        phases = (
            (span.begin, span.turn, c.prefill, span.prefill, span.hover[0]),
            (span.turn, span.end, c.hue("generated"), span.decode, span.hover[1]),
        )
        for a, b, fill, seconds, hover in phases:
            cells.add(a, b, y, height, fill=fill, hatch="/" if span.estimated else "", hover=hover, data=[span.id])
            if fits and seconds:
                plate = {"bgcolor": fill, "borderpad": 1} if span.estimated else {}  # hatching would run through the digits
                note = {"text": f"<b>{say.seconds(seconds)}</b>", "font": {"size": frame.small, "color": c.on(fill)}}
                sheet.note(x=(a + b) / 2, y=y, **note, **plate, column=column)
        if span.saved:
            _ghost(sheet, frame, y, span, pixels, column)
        if behind:
            place = {"x": span.end + span.saved, "xanchor": "left", "xshift": 6 * frame.scale, "y": y}
            font = {"size": frame.small, "color": c.ink}
            sheet.note(text=behind, font=font, **place, column=column)
    sheet.trace(cells.trace(), column=column)


def _ghost(sheet: Sheet, frame: Frame, y: int, span: _Span, pixels: float, column: int) -> None:  # noqa: PLR0917
    """Outline the prefill that caching removed, behind the row."""
    c, half = frame.colours, frame.bar * 0.85 / 2
    a, b = span.end + 3 / pixels, span.end + span.saved
    if b <= a:
        return
    outline = {"line": {"color": c.mute, "width": 1.5 * frame.scale, "dash": "dash"}, "fillcolor": CLEAR}
    sheet.shape(type="rect", x0=a, x1=b, y0=y - half, y1=y + half, **outline, column=column)
    text = say.SAVED.format(time=say.seconds(span.saved))
    if _ghost_fits(frame, span, pixels):
        font = {"size": frame.small, "color": c.mute}
        sheet.note(x=(a + b) / 2, y=y, text=text, font=font, column=column)
