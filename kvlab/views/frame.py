"""What all figures share: sizes, fonts, margins, axes, titles; and cells drawn as bars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvlab.views.palette import Palette, Theme, palette
from kvlab.views.sheet import Sheet
from kvlab.views.text import text_width, wrap

if TYPE_CHECKING:
    from collections.abc import Iterable

    import plotly.graph_objects as go

    from kvlab.trace.recorder import Record

FONT = "Inter, system-ui, 'Segoe UI', 'DejaVu Sans', 'Noto Sans CJK JP', 'Noto Color Emoji', Helvetica, Arial, sans-serif"

CLEAR = "rgba(0,0,0,0)"


@dataclass(frozen=True)
class Frame:
    """Theme, scale and width of a figure, and all sizes that follow from them, in pixels.

    A scale of 1.5 is the projector's: the smallest text then has 18 pixels. `width` decides which labels fit; the figure itself
    takes the width of its element.
    """

    theme: Theme
    scale: float
    width: float

    @property
    def colours(self) -> Palette:
        """The palette of the theme."""
        return palette(self.theme)

    @property
    def small(self) -> float:
        """Smallest text."""
        return 12 * self.scale

    @property
    def normal(self) -> float:
        """Titles of axes, subtitles."""
        return 13 * self.scale

    @property
    def big(self) -> float:
        """Titles."""
        return 15 * self.scale

    @property
    def left(self) -> float:
        """Margin for row labels and their axis title. Ribbon, tree and timeline share it, so that their x axes stand in line."""
        return 58 * self.scale

    @property
    def right(self) -> float:
        """Margin for what is said at the end of a row."""
        return min(178 * self.scale, self.width * 0.3)

    @property
    def plot(self) -> float:
        """Width between the margins."""
        return max(self.width - self.left - self.right, 60.0)

    @property
    def row(self) -> float:
        """Distance between rows."""
        return 38 * self.scale

    @property
    def bar(self) -> float:
        """Height of a row's bar, as a share of the distance between rows: half of it must hold a line of small text."""
        return 0.8

    def sheet(
        self,
        title: str,
        subtitle: str,
        height: float,
        *,
        x_title: str,
        y_title: str = "",
        axis: bool = True,
        left: float | None = None,
        right: float | None = None,
    ) -> Sheet:
        """Return an empty sheet whose plot area is `height` pixels high."""
        c = self.colours
        left, right = self.left if left is None else left, self.right if right is None else right
        lines = self._title(title, subtitle)
        top = (len(lines) * 20 + 9) * self.scale
        bottom = (50 if axis else 8) * self.scale
        line: dict[str, Any] = {
            "fixedrange": True,
            "zeroline": False,
            "showgrid": False,
            "color": c.mute,
            "tickfont": {"size": self.small},
        }
        layout = dict(  # noqa: C408 - properties of plotly, not keys
            font={"family": FONT, "size": self.normal, "color": c.ink},
            paper_bgcolor=c.background,
            plot_bgcolor=c.background,
            showlegend=False,
            barmode="overlay",
            bargap=0,
            hovermode="closest",
            dragmode=False,
            autosize=True,
            height=round(top + height + bottom),
            hoverlabel={
                "font": {"size": self.normal, "family": FONT, "color": c.ink},
                "bgcolor": c.panel,
                "bordercolor": c.mute,
                "align": "left",
                "namelength": 0,
            },
            margin={"l": left, "r": right, "t": top, "b": bottom, "pad": 0},
        )
        sheet = Sheet(layout)
        sheet.xaxis(
            **line,
            visible=axis,
            ticks="outside" if axis else "",
            tickcolor=c.mute,
            ticklen=7 * self.scale,
            title={"text": x_title, "font": {"size": self.small, "color": c.mute}, "standoff": 4 * self.scale},
        )
        sheet.yaxis(
            **line,
            showline=False,
            ticks="",
            ticklabelstandoff=round(4 * self.scale),
            title={"text": y_title, "font": {"size": self.small, "color": c.mute}, "standoff": 2 * self.scale},
        )
        sheet.note(  # plotly's own title cuts its first line off when it has more than one
            text="<br>".join(lines),
            xref="paper",
            yref="paper",
            x=0,
            y=1,
            xanchor="left",
            yanchor="bottom",
            align="left",
            xshift=4 * self.scale - left,
            yshift=5 * self.scale,
            borderpad=0,
            font={"size": self.big, "color": c.ink},
        )
        return sheet

    def _title(self, title: str, subtitle: str) -> list[str]:
        """Return the lines of a title: the subtitle stands beside the title, or below it where it does not fit."""
        mute = f'<span style="color:{self.colours.mute};font-size:{self.normal}px;font-weight:400">'
        room = self.width - 12 * self.scale
        beside = room - text_width(f"{title}  ", self.big, bold=True)
        if text_width(subtitle, self.normal) <= beside:
            return [f"<b>{title}</b>  {mute}{subtitle}</span>"]
        return [f"<b>{title}</b>", *(f"{mute}{line}</span>" for line in wrap(subtitle, room, self.normal))]

    def empty(self, title: str, message: str, height: float) -> go.Figure:
        """Return a figure that says what to do, of the size that it will have."""
        sheet = self.sheet(title, "", height, x_title="", axis=False, right=8 * self.scale)
        sheet.yaxis(visible=False)
        lines = wrap(message, self.plot, self.normal)
        sheet.note(
            text="<br>".join(lines),
            xref="paper",
            yref="paper",
            x=0.5,
            y=0.5,
            font={"size": self.normal + self.scale, "color": self.colours.mute},
        )
        border = {"color": self.colours.line, "width": 1, "dash": "dot"}
        sheet.shape(type="rect", xref="paper", yref="paper", x0=0, x1=1, y0=0, y1=1, line=border)
        return sheet.figure()

    def rows(self, sheet: Sheet, labels: list[str]) -> None:
        """Lay the y axis out as rows from the top down, with one label each."""
        sheet.yaxis(range=[len(labels) - 0.5, -0.5], tickvals=list(range(len(labels))), ticktext=labels)


def tick_step(span: float, pixels: float, wanted: float) -> float:
    """Return the step of 1, 2 or 5 times a power of ten at which ticks stand at least `wanted` pixels apart."""
    step = 1e-6
    while True:
        for factor in (1, 2, 5):
            if factor * step * pixels >= wanted * span:
                return factor * step
        step *= 10


@dataclass
class Cells:
    """Rectangles of one figure, drawn as one bar trace: the mark of plotly that has a fill, an edge, a hover and a click each."""

    frame: Frame
    rows: list[tuple[float, float, float, float, str, str, float, str, str, Any]] = field(default_factory=list)

    def add(
        self,
        x0: float,
        x1: float,
        y: float,
        height: float,
        *,
        fill: str,
        edge: str | None = None,
        line: float = 1.0,
        hatch: str = "",
        hover: str = "",
        data: list[Any] | None = None,
    ) -> None:
        """Add the rectangle from `x0` to `x1`, `height` rows high, around row `y`."""
        self.rows.append(
            (x0, x1 - x0, y, height, fill, edge or fill, line * self.frame.scale if edge else 0.0, hatch, hover, data)
        )

    def cell(
        self,
        x0: float,
        x1: float,
        y: float,
        height: float,
        *,
        mark: str,
        source: str | None,
        hover: str = "",
        data: list[Any] | None = None,
    ) -> None:
        """Add a cell with the meaning of the legend: reused, computed, idle, pending, free or null."""
        c = self.frame.colours
        hue = c.hue(source)
        if mark == "reused":
            self.add(x0, x1, y, height, fill=hue, hover=hover, data=data)
        elif mark == "computed":  # the outline first, then its lower half; y runs downwards
            self.add(x0, x1, y, height, fill=c.background, edge=hue, hover=hover, data=data)
            self.add(x0, x1, y + height / 4, height / 2, fill=hue, hover=hover, data=data)
        elif mark == "idle":
            self.add(x0, x1, y, height, fill=c.faded(source), edge=c.faded_edge(source), hover=hover, data=data)
        elif mark == "pending":
            self.add(x0, x1, y, height, fill=c.background, edge=hue, hover=hover, data=data)
        elif mark == "free":
            self.add(x0, x1, y, height, fill=c.background, edge=c.free, hover=hover, data=data)
        else:
            self.add(x0, x1, y, height, fill=c.line, hover=hover, data=data)

    def trace(self) -> dict[str, Any]:
        """Return all rectangles as one trace; ``customdata`` holds what each was added with."""
        base, length, y, height, fill, edge, line, hatch, hover, data = (
            map(list, zip(*self.rows, strict=True)) if self.rows else ([] for _ in range(10))
        )
        marker: dict[str, Any] = {"color": fill, "line": {"color": edge, "width": line}, "cornerradius": 0}
        if any(hatch):
            lines = self.frame.colours.background
            marker["pattern"] = {"shape": hatch, "fillmode": "overlay", "fgcolor": lines, "size": 6 * self.frame.scale}
        return dict(  # noqa: C408 - properties of plotly, not keys
            type="bar",
            orientation="h",
            base=base,
            x=length,
            y=y,
            width=height,
            marker=marker,
            customdata=data,
            textposition="none",
            hovertext=hover,
            hoverinfo="text",
            cliponaxis=True,
        )


def listed(records: Mapping[str, Record] | Iterable[Record]) -> list[Record]:
    """Return records as a list, in their order."""
    return list(records.values() if isinstance(records, Mapping) else records)
