"""A plotly picture as a widget that cannot lose an update: its figure is a trait, and a view draws what the trait holds."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets as t
from comm import DummyComm

from kvlab.widgets.table import Data, build_table, figure_data, plain_text

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

WORDS = {
    "waiting": "Loading the picture …",
    "late": "plotly.js has not come from the notebook's kernel for {seconds} seconds. A busy kernel answers when it is done; "
    "if it has stopped, run the notebook again or reload the page.",
    "again": "Ask again",
    "empty": "Nothing to draw yet.",
    "failed": "This picture could not be drawn: {why}",
    "png": "PNG",
    "png_title": "Download this picture as PNG",
    "svg": "SVG",
    "svg_title": "Download this picture as SVG",
    "data": "Data",
    "data_title": "The data behind this picture as a table",
    "no_data": "There is no data behind this picture.",
    "no_table": "The data could not be listed: {why}",
    "first_rows": "the first {shown} of {total} rows",
    "controls": "This picture",
}
"""What a chart itself says; the browser holds no text of its own."""

KERNEL = uuid.uuid4().hex  # one a process: charts of one kernel ask once for plotly.js, whatever is on the page
_first = threading.Lock()  # held for good by the first chart of this process that a page can see


@cache
def plotly_js() -> bytes:
    """Return the plotly.js of the installed plotly package, gzipped (4.8 MB become 1.5)."""
    import plotly

    return gzip.compress(resources.files(plotly).joinpath("package_data", "plotly.min.js").read_bytes(), 4)


@cache
def plotly_js_version() -> str:
    """Return the version of that plotly.js: pages keep one of each."""
    from plotly.offline import get_plotlyjs_version

    return str(get_plotlyjs_version())


def _source(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


class Chart(anywidget.AnyWidget):
    """A plotly figure on the page, with a summary, a data table and downloads.

    Parameters
    ----------
    figure : plotly.graph_objects.Figure, optional
        What to show; `show` shows another one later.
    alt : str, optional
        What a reader who does not see the picture should know it is of; without it the figure's title.
    summary : str, optional
        One or two sentences that say what the picture shows, drawn below it.
    table : Data or callable, optional
        The data behind the picture (see `kvlab.widgets.table`); without it, what the figure's traces hold. A callable is called
        only while somebody has the table open.

    Attributes
    ----------
    clicked, hovered : dict
        The point last clicked, and the point under the pointer (empty when none): ``curve`` (index of the trace), ``name``,
        ``point`` (index in it; ``[row, column]`` in a heat map), ``x``, ``y``, ``z``, ``text``, ``id``, ``customdata``, each
        where it exists. ``clicked`` also holds ``count``, so that a second click on the same point is news.
    theme : {"light", "dark"}
        The page's colours, as the browser reports them: JupyterLab's theme, or what the system prefers.
    text_size : int
        The page's text size in px, likewise; a figure that names no font size gets it.
    data_open : bool
        Whether the table is open.
    revision : int
        Number of the figure that the trait holds. On the page, ``data-kvlab-drawn`` of the element ``.kvlab-chart`` is the
        number of the figure on screen; it is absent while words stand in place of a picture.
    """

    _esm = _source("runtime.js") + _source("chart.js")
    _css = _source("chart.css")

    figure = t.Dict(help="data, layout and revision").tag(sync=True)
    alt = t.Unicode().tag(sync=True)
    summary = t.Unicode().tag(sync=True)
    message = t.Unicode(help="words that stand in place of the picture").tag(sync=True)
    table = t.Dict(help="columns, rows and total; or error").tag(sync=True)
    data_open = t.Bool(default_value=False).tag(sync=True)
    clicked = t.Dict().tag(sync=True)
    hovered = t.Dict().tag(sync=True)
    theme = t.Enum(["light", "dark"], "light").tag(sync=True)
    text_size = t.Int(14).tag(sync=True)
    filename = t.Unicode("kvlab").tag(sync=True)
    patience = t.Float(10, help="seconds without plotly.js until the page says so").tag(sync=True)
    words = t.Dict(WORDS).tag(sync=True)
    kernel = t.Unicode(KERNEL).tag(sync=True)
    plotly_js_version = t.Unicode().tag(sync=True)

    def __init__(
        self,
        figure: Figure | Mapping[str, Any] | None = None,
        *,
        alt: str = "",
        summary: str = "",
        table: Data | Callable[[], Data] | None = None,
        **traits: Any,  # noqa: ANN401 - any other trait of a widget
    ) -> None:
        self._changing = threading.RLock()
        self._data: Data | Callable[[], Data] = []
        super().__init__(alt=alt, summary=summary, plotly_js_version=plotly_js_version(), **traits)
        self.on_msg(self._answer)
        # Voila's page comes when all cells have run; every other page is already there.
        if not isinstance(self.comm, DummyComm) and "VOILA_BASE_URL" not in os.environ and _first.acquire(blocking=False):
            self._bring_plotly()
        self.observe(self._fill_table, "data_open")
        if figure is not None:
            self.show(figure, alt=alt or None, table=table)

    def show(
        self,
        figure: Figure | Mapping[str, Any],
        *,
        alt: str | None = None,
        summary: str | None = None,
        table: Data | Callable[[], Data] | None = None,
    ) -> None:
        """Show another figure. May be called from any thread, as often as there is news.

        Parameters
        ----------
        figure : plotly.graph_objects.Figure or mapping
            The figure, or its ``data`` and ``layout``.
        alt, summary : str, optional
            As of the class; None keeps `summary`, and takes `alt` from the figure's title where it has one.
        table : Data or callable, optional
            As of the class.

        Raises
        ------
        TypeError
            If `figure` is no figure; what is on screen stays.
        ValueError
            If a mapping holds what plotly does not know; likewise.
        """
        import plotly.graph_objects as go

        if not isinstance(figure, go.Figure):
            if not isinstance(figure, Mapping):
                msg = f"A chart shows a plotly Figure or a mapping with data and layout, not {type(figure).__name__}."
                raise TypeError(msg)
            figure = go.Figure(figure)
        shown = json.loads(figure.to_json())
        title = plain_text(figure.layout.title.text or "")
        with self._changing, self.hold_sync():
            self._data = table if table is not None else lambda: figure_data(figure)
            self.figure = {"data": shown["data"], "layout": shown["layout"], "revision": self.revision + 1}
            self.message = ""
            self.alt = alt if alt is not None else title or self.alt
            self.filename = re.sub(r"\W+", "-", self.alt).strip("-")[:60] or "kvlab"
            if summary is not None:
                self.summary = summary
            self._fill_table()

    def say(self, words: str) -> None:
        """Put `words` in place of the picture until the next `show`: what is missing, what went wrong."""
        self.message = words

    @property
    def revision(self) -> int:
        """How many figures this chart has been given."""
        return int(self.figure.get("revision", 0))

    def __repr__(self) -> str:
        """Name the chart in words, for pages that run no widgets."""
        return f"Chart({self.alt!r})" + (f": {self.summary}" if self.summary else "")

    def _fill_table(self, _change: object = None) -> None:
        if not self.data_open:
            return
        try:
            self.table = build_table(self._data() if callable(self._data) else self._data)
        except Exception as error:  # noqa: BLE001 - whatever the caller's table ran into is said in its place
            self.table = {"error": self.words["no_table"].format(why=error)}

    def _bring_plotly(self) -> None:
        self.send({"plotly_js": self.plotly_js_version}, buffers=[plotly_js()])

    def _answer(self, _chart: object, content: dict[str, Any], _buffers: object) -> None:
        if content.get("want") == "plotly.js":
            self._bring_plotly()
        elif content.get("want") == "state":
            self.send_state()
