"""A lab: controls on the left, a source of scenes behind, pictures on the right. Which of them, is data (`CONTROLS`, `VIEWS`)."""

from __future__ import annotations

import html
import logging
import os
import threading
import time
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any

import ipywidgets as w
import traitlets as t

from kvlab.engine.errors import in_words
from kvlab.situations import TIMESTAMPS
from kvlab.views import block_map, radix_tree, ribbon, summary, timeline
from kvlab.views.legend import legend
from kvlab.widgets import words
from kvlab.widgets.chart import Chart
from kvlab.widgets.scene import POLICIES, LiveSource, Scene, Settings, recorded_scene

if TYPE_CHECKING:
    from collections.abc import Callable

    import plotly.graph_objects as go

    from kvlab.views.palette import Theme

ROWS = 4  # requests shown in a ribbon
WIDTH = 990  # pixels of the pictures' column
HALF = 485
LEFT = "230px"
TELL_EVERY = 0.3  # s; a message a token would keep server and browser busy on the model's cores


@dataclass(frozen=True, slots=True)
class Control:
    """One setting: a choice among `options` (value -> label), or a whole number of at least `least`."""

    name: str
    label: str
    options: dict[str, str] | None = None
    least: int = 1


@dataclass(frozen=True, slots=True)
class View:
    """One picture: what draws it, what says it in words, and what lists its data."""

    name: str
    alt: str
    draw: Callable[[Scene, dict[str, Any]], go.Figure]
    say: Callable[[Scene], str]
    data: Callable[[Scene], list[dict[str, Any]]]


CONTROLS = (
    Control("timestamp", words.TIMESTAMP, {words.TIMESTAMPS[x]: x for x in sorted(TIMESTAMPS, key=lambda x: x != "none")}),
    Control("shared", words.SHARED),
    Control("question", words.QUESTION),
    Control("answer", words.ANSWER),
    Control("block_size", words.BLOCK_SIZE),
    Control("page_size", words.PAGE_SIZE),
)


def _ribbon(policy: str) -> View:
    def draw(scene: Scene, look: dict[str, Any]) -> go.Figure:
        side = scene.sides.get(policy)
        if side is None:
            return ribbon.prompt_ribbon([], 1, policy=policy, width=WIDTH, **look)
        span = max((len(r.tokens) for s in scene.sides.values() for r in s.last(ROWS)), default=None)
        return ribbon.prompt_ribbon(
            side.records, side.state.unit, policy=policy, width=WIDTH, span=span, texts=side.texts, max_rows=ROWS, **look
        )

    def say(scene: Scene) -> str:
        side = scene.sides.get(policy)
        return ribbon.summary(side.last(1), side.state.unit, policy=policy, instead_of=side.full_seconds) if side else ""

    def data(scene: Scene) -> list[dict[str, Any]]:
        side = scene.sides.get(policy)
        return ribbon.table(side.records, side.state.unit, policy=policy, texts=side.texts) if side else []

    return View(f"ribbon-{policy}", words.RIBBON.format(policy=words.POLICY[policy]), draw, say, data)


def _blocks(scene: Scene, look: dict[str, Any]) -> go.Figure:
    side = scene.sides.get("vllm")
    if side is None:
        return block_map.block_map(None, [], width=HALF, **look)
    return block_map.block_map(side.state, side.records, just_evicted=side.evicted, width=HALF, **look)


def _tree(scene: Scene, look: dict[str, Any]) -> go.Figure:
    side = scene.sides.get("sglang")
    return radix_tree.radix_tree(side.state if side else None, side.records if side else [], width=HALF, **look)


def _seconds(scene: Scene, look: dict[str, Any]) -> go.Figure:
    records = {p: s.last(ROWS) for p, s in scene.sides.items()}
    return timeline.split_bars(records, {p: s.saved_seconds for p, s in scene.sides.items()}, width=WIDTH, **look)


def _say_seconds(scene: Scene) -> str:
    return " ".join(f"{words.POLICY[p]}: {timeline.summary(s.last(1), s.saved_seconds)}" for p, s in scene.sides.items())


def _list_seconds(scene: Scene) -> list[dict[str, Any]]:
    sides = scene.sides.items()
    return timeline.split_table({p: s.records for p, s in sides}, {p: s.saved_seconds for p, s in sides})


VIEWS = (
    *map(_ribbon, POLICIES),
    View(
        "blocks",
        words.BLOCKS,
        _blocks,
        lambda s: block_map.summary(s.sides["vllm"].state) if s.sides else "",
        lambda s: block_map.table(s.sides["vllm"].state, s.sides["vllm"].records) if s.sides else [],
    ),
    View(
        "tree",
        words.TREE,
        _tree,
        lambda s: radix_tree.summary(s.sides["sglang"].state) if s.sides else "",
        lambda s: radix_tree.table(s.sides["sglang"].state, s.sides["sglang"].records) if s.sides else [],
    ),
    View("seconds", words.SECONDS, _seconds, _say_seconds, _list_seconds),
)


def _words(error: Exception) -> str:
    """Return what to say of an error: a setting that cannot be says so itself. KVLAB_DEBUG=1 logs where it arose."""
    if os.environ.get("KVLAB_DEBUG"):
        logging.getLogger(__name__).error("Lab", exc_info=error)
    return str(error) if isinstance(error, ValueError) else in_words(error)


@cache
def _css() -> str:
    return resources.files(__package__).joinpath("lab.css").read_text(encoding="utf-8")


class Lab(w.VBox):
    """The main dashboard: one model, the same requests, two caches.

    Parameters
    ----------
    model : None, str, path or Loaded
        as `kvlab.load_model` takes it; it is loaded beside, while a recorded run is on screen.
    num_tokens : int
        slots of each pool.

    Attributes
    ----------
    phase : {"loading", "ready", "working", "failed"}
        ``failed``: the model could not be loaded; the button tries again.
    message, trouble : str, bool
        what stands below the buttons, and whether it is an error.
    scene : Scene
        what is on screen.
    charts : dict of str to Chart
    """

    phase = t.Enum(["loading", "ready", "working", "failed"], "loading")
    _said = t.Tuple(t.Unicode(), t.Bool(), default_value=("", False))  # one trait: two threads may speak

    def __init__(self, model: Any = None, num_tokens: int = 4096) -> None:  # noqa: ANN401 - a name, a path or a Loaded
        self.source = LiveSource(model, num_tokens)
        self.scene = recorded_scene()
        self._stop = threading.Event()  # set and cleared with the lock held, so that it always means the run under way
        self._told = 0.0  # when progress was last told, monotonic seconds
        self._lock = threading.RLock()  # held where phase changes
        self._drawing = threading.Lock()
        self._worker: threading.Thread | None = None
        self._build()
        super().__init__(children=[self._style, self._head, w.HBox([self._left, self._right], layout=w.Layout(width="100%"))])
        self.add_class("kvlab-lab")
        self.observe(self._paint_status, ["phase", "_said"])
        self.charts["ribbon-vllm"].observe(lambda _: self.draw(), "theme")
        self.draw()
        self._start_loading()

    # ------------------------------------------------------------------ widgets
    def _build(self) -> None:
        self._style = w.HTML(f"<style>{_css()}</style>")
        self._head = w.HTML()
        self.controls = {c.name: self._control(c) for c in CONTROLS}
        self.run_button = w.Button(description=words.RUN, tooltip=words.RUN_HELP, button_style="primary", disabled=True)
        self.stop_button = w.Button(description=words.STOP, tooltip=words.STOP_HELP, disabled=True)
        self.over_button = w.Button(description=words.START_OVER, tooltip=words.START_OVER_HELP, disabled=True)
        self.bar = w.FloatProgress(min=0, max=1, layout=w.Layout(width="100%", margin="4px 0"))
        self._status = w.HTML()
        self.run_button.on_click(lambda _: self.run())
        self.stop_button.on_click(lambda _: self.stop())
        self.over_button.on_click(lambda _: self.start_over())
        for button in (self.run_button, self.stop_button, self.over_button):
            button.layout.width = "auto"
            button.layout.height = "34px"
        buttons = [self.run_button, self.stop_button, self.over_button]
        column = [*self.controls.values(), *buttons, self.bar, self._status]
        self._left = w.VBox(column, layout=w.Layout(width=LEFT, flex=f"0 0 {LEFT}"))
        self._left.add_class("kvlab-left")
        self._sentence = w.HTML()
        self.charts = {v.name: Chart(alt=v.alt) for v in VIEWS}
        self._legend = w.HTML()
        pair = w.HBox([self.charts["blocks"], self.charts["tree"]])
        pair.add_class("kvlab-pair")
        ribbons = [self.charts[f"ribbon-{p}"] for p in POLICIES]
        column = [self._sentence, *ribbons, pair, self.charts["seconds"], self._legend]
        self._right = w.VBox(column, layout=w.Layout(flex="1 1 auto", min_width="0"))
        self._right.add_class("kvlab-right")

    def _control(self, control: Control) -> w.VBox:
        default = getattr(Settings(), control.name)
        if control.options:
            field: w.Widget = w.Dropdown(options=list(control.options.items()), value=default, layout=w.Layout(width="auto"))
        else:
            field = w.IntText(value=default, layout=w.Layout(width="auto"))
        field.description_allow_html = False
        label = w.Label(control.label)
        box = w.VBox([label, field])
        box.add_class("kvlab-control")
        box.field = field
        return box

    # ------------------------------------------------------------------ what people do
    def settings(self) -> Settings:
        """Return what the controls say.

        Raises
        ------
        ValueError
            for a number that cannot be, in words.
        """
        values: dict[str, Any] = {}
        for control in CONTROLS:
            value = self.controls[control.name].field.value
            if control.options is None and (not isinstance(value, int) or value < control.least):
                raise ValueError(words.NOT_A_NUMBER.format(name=control.label, value=value, least=control.least))
            values[control.name] = value
        return Settings(**values)

    def run(self) -> None:
        """Send requests with the controls' settings; while one works, say so and change nothing."""
        with self._lock:
            if self.phase == "failed":
                self._start_loading()
                return
        try:
            settings = self.settings()
        except ValueError as error:
            self._say(str(error), trouble=True)
            return
        self._begin(lambda: self._work(settings))

    def stop(self) -> None:
        """End the request under way after its step."""
        with self._lock:
            if self.phase == "working":
                self._stop.set()
                self._say(words.STOPPING)

    def start_over(self) -> None:
        """Empty both caches and forget all requests."""
        with self._lock:
            if self._refuse_if_busy():
                return
            self.source.start_over()
            self.scene = self.source.scene()
            self.bar.value = 0
            self._say(words.READY)
        self.draw()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing works in the background; return False if `timeout` seconds were not enough."""
        worker = self._worker
        if worker is not None:
            worker.join(timeout)
        return worker is None or not worker.is_alive()

    # ------------------------------------------------------------------ work beside the kernel's main thread
    def _refuse_if_busy(self) -> bool:
        if self.phase == "ready":
            return False
        said = {"working": words.BUSY, "loading": words.NOT_READY}.get(self.phase, self.message)
        self._say(said, trouble=self.phase == "failed")
        return True

    def _begin(self, work: Callable[[], None]) -> None:
        with self._lock:  # of ten clicks one begins
            if self._refuse_if_busy():
                return
            self._stop.clear()
            self.phase = "working"
        self._worker = threading.Thread(target=work, name="kvlab-lab", daemon=True)
        self._worker.start()

    def _start_loading(self) -> None:
        self.bar.value = 0
        self.phase = "loading"
        self._say(words.LOADING)
        self._worker = threading.Thread(target=self._load, name="kvlab-load", daemon=True)
        self._worker.start()

    def _load(self) -> None:
        try:
            self.source.load(self._tell)
        except Exception as error:  # noqa: BLE001 - whatever keeps the model away is said in words
            with self._lock:
                self._say(_words(error), trouble=True)
                self.phase = "failed"
            return
        with self._lock:
            self.bar.value = 0
            self._say(words.READY)
            self.phase = "ready"
        self._paint_head()

    def _work(self, settings: Settings) -> None:
        trouble = ""
        self._say("")
        try:
            self.source.run(settings, self._tell, self._look, self._stop)
        except Exception as error:  # noqa: BLE001 - said in words; the engines are as they were
            trouble = _words(error)
        with self._lock:
            self._say(trouble or (words.STOPPED if self._stop.is_set() else words.DONE), trouble=bool(trouble))
            self.bar.value = 0
            self.phase = "ready"

    def _look(self) -> None:
        self.scene = self.source.scene()
        self.draw()

    def _tell(self, fraction: float, what: str) -> None:
        now = time.monotonic()
        if now - self._told < TELL_EVERY and what == self.message:
            return
        self._told = now
        self.bar.value = fraction
        with self._lock:
            if not self._stop.is_set():
                self._say(what)

    @property
    def message(self) -> str:  # noqa: D102 - see Attributes
        return str(self._said[0])

    @property
    def trouble(self) -> bool:  # noqa: D102 - see Attributes
        return bool(self._said[1])

    def _say(self, message: str, *, trouble: bool = False) -> None:
        self._said = (message, trouble)

    # ------------------------------------------------------------------ what is to be seen
    def draw(self) -> None:
        """Draw the scene anew."""
        with self._drawing:  # a new theme may come while a run ends
            self._draw(self.scene)

    def _draw(self, scene: Scene) -> None:
        theme: Theme = "dark" if self.charts["ribbon-vllm"].theme == "dark" else "light"
        look = {"theme": theme, "scale": 1.0}
        for view in VIEWS:
            chart = self.charts[view.name]
            try:
                chart.show(view.draw(scene, look), alt=view.alt, summary=view.say(scene), table=partial(view.data, scene))
            except Exception as error:  # noqa: BLE001 - a picture that fails says so in its place
                chart.say(words.DRAW_FAILED.format(error=_words(error)))
        parts = {p.source for side in scene.sides.values() for r in side.records for p in r.parts}
        self._legend.value = legend({*parts, "system", "timestamp", "question", "generated"}, theme=theme)
        self._paint_head()
        self._paint_sentence()

    def _paint_head(self) -> None:
        about = html.escape(self.scene.about if self.scene.about == words.RECORDED else self.source.about)
        self._head.value = (
            f'<div class="kvlab-head"><h1>{words.TITLE}</h1><span class="kvlab-sub">{words.SUBTITLE}</span>'
            f'<span class="kvlab-about">{about}</span></div>'
        )

    def _paint_sentence(self) -> None:
        last = self.scene.latest
        full = {policy: self.scene.sides[policy].full_seconds for policy in last}
        instead = {policy: full[policy][record.id] for policy, record in last.items() if record.id in full[policy]}
        first = html.escape(summary.headline(last, instead))
        reasons = []
        for policy, record in last.items():
            side = self.scene.sides[policy]
            reason = summary.why(record, side.state.unit, policy, side.records[:-1])
            reasons.append(f"<b>{words.POLICY[policy]}</b>: {html.escape(reason)}")
        self._sentence.value = (
            f'<div class="kvlab-sentence tex2jax_ignore"><div class="kvlab-result">{first}</div>'
            + "".join(f'<div class="kvlab-why">{r}</div>' for r in reasons)
            + "</div>"
        )

    def _paint_status(self, _change: object = None) -> None:
        working = self.phase == "working"
        self.run_button.disabled = self.phase in ("working", "loading")
        self.run_button.description = words.RETRY if self.phase == "failed" else words.RUN
        self.stop_button.disabled = not working
        self.over_button.disabled = self.phase != "ready"
        kind = "kvlab-trouble" if self.trouble else "kvlab-quiet"
        role = "alert" if self.trouble else "status"
        self._status.value = f'<div class="{kind}" role="{role}">{html.escape(self.message)}</div>'
