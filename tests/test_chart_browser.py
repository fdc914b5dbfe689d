"""Charts in real pages: Voila plain, Voila with preheated kernels, and JupyterLab, in Chromium."""

from __future__ import annotations

import re
import shutil

import nbformat
import pytest
from browser import Server, Tab, browser_tab, lab_server, voila_server, wait_for_pools
from test_chart import HOSTILE

SETUP = """
import threading, time
from pathlib import Path
import ipywidgets as w
import plotly.graph_objects as go
from IPython.display import display
from kvlab.widgets.chart import Chart

names = ["line", "map", "bars"]
charts = [Chart(alt=name) for name in names]

def figure(name, step):
    data = {
        "line": go.Scatter(x=list(range(20)), y=[(i * step) % 7 for i in range(20)]),
        "map": go.Heatmap(z=[[(i * j + step) % 5 for i in range(10)] for j in range(5)], showscale=False),
        "bars": go.Bar(x=["a", "b", "c"], y=[step, 2, 3]),
    }[name]
    return go.Figure(data, layout=dict(title=f"{name} {step}", height=220, margin=dict(l=40, r=20, t=40, b=30)))

def update(step):
    for name, chart in zip(names, charts):
        chart.show(figure(name, step), alt=name, summary=f"This is step {step}.")

def rush(button):
    for step in range(1, 21):
        update(step)

def stream(button):
    def run():
        for step in range(1, 21):
            update(step)
            time.sleep(0.05)
    threading.Thread(target=run).start()

def button(text, action):
    made = w.Button(description=text)
    made.on_click(action)
    return made

update(0)
display(w.HBox([button("Rush", rush), button("Stream", stream)]))
"""

# Each chart in a cell of its own, as in a notebook that explains.
THREE = [SETUP, "charts[0]", "charts[1]", "charts[2]"]

DETAILS = [
    SETUP,
    f"hostile = {HOSTILE!r}",
    """
import html
said, under = w.Label("nothing clicked"), w.Label("nothing under")
bars = go.Bar(x=[html.escape(t, quote=False) for t in hostile], y=list(range(1, 8)))
text = Chart(
    go.Figure(bars, layout=dict(title=html.escape("".join(hostile), quote=False))),
    alt="".join(hostile), summary="".join(hostile), table={"token": hostile, "n": list(range(7))},
)
text.summary = "".join(hostile)
text.observe(lambda change: setattr(said, "value", f"clicked {change.new['point']}, {change.new['count']} times"), "clicked")
text.observe(lambda change: setattr(under, "value", f"pointer at {change.new.get('point')}"), "hovered")
text.observe(lambda change: setattr(said, "value", f"theme {change.new}"), "theme")
hidden = w.Accordion([charts[0]], titles=["Hidden"])
display(text, said, under, hidden, button("Say", lambda b: text.say("Not now: <b>busy</b>.")))
""",
]

# The kernel lets the first question for plotly.js pass unanswered.
SILENT = [
    """
from kvlab.widgets.chart import Chart
answer, asked = Chart._answer, []
def late(self, chart, content, buffers):
    asked.append(content)
    if len(asked) > 1:
        answer(self, chart, content, buffers)
Chart._answer = late  # before the first chart: on a page all of a kernel's charts may ask
""",
    SETUP,
    'Chart(figure("bars", 1), alt="bars", patience=1)',
]

# A cell that ends when a file appears: the charts above must not wait for it.
BUSY = [
    SETUP,
    "charts[0]",
    "while not Path('go').exists(): time.sleep(0.1)",
    "charts[1]",
    "import os; print('end of', os.getpid())",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("notebooks")
    for name, cells in {"three": THREE, "details": DETAILS, "silent": SILENT, "busy": BUSY}.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, path / f"{name}.ipynb")
    return path


@pytest.fixture(scope="module")
def voila(folder):
    with voila_server(folder) as server:
        yield server


@pytest.fixture(scope="module")
def lab(folder):
    with lab_server(folder) as server:
        yield server


def rush_and_stream(tab: Tab, revision: int = 1) -> int:
    """Press both buttons and see every chart reach the last of their updates."""
    tab.wait_for_charts(3, revision)
    for name in ("Rush", "Stream"):
        tab.page.get_by_role("button", name=name, exact=True).click()
        revision += 20
        tab.wait_for_charts(3, revision)
    assert [chart["revision"] for chart in tab.charts()] == [revision] * 3
    assert [chart["alt"] for chart in tab.charts()] == ["line", "map", "bars"]
    assert tab.page.get_by_text("This is step 20.").count() == 3
    return revision


def load_voila(server: Server, address: str, name: str, filled: int | None = None) -> None:
    if filled is not None:
        wait_for_pools(server, fillings=filled)
    with browser_tab() as tab:
        tab.page.goto(f"{server.url}/{address}")
        rush_and_stream(tab)
        tab.screenshot(name)
        tab.assert_clean()


def test_voila_shows_every_last_update(voila) -> None:
    load_voila(voila, "voila/render/three.ipynb", "chart_voila")


def load_lab(server: Server, name: str) -> None:
    notebook = shutil.copy(server.folder / "three.ipynb", server.folder / f"{name}.ipynb")  # it will be saved with its outputs
    with browser_tab(height=1500) as tab:
        tab.open_notebook(server, notebook.name)
        tab.run_all_cells()
        revision = rush_and_stream(tab)
        tab.screenshot(name)
        tab.save_notebook()
        tab.page.reload()
        tab.wait_for_charts(3, revision)  # from the kernel, which lives on
        tab.shut_down_kernels(server)
        tab.assert_clean()


def test_jupyterlab_shows_every_last_update_and_again_after_a_reload(lab) -> None:
    load_lab(lab, "chart_lab")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_of_ten_loads(voila, folder, lab) -> None:
    for time in range(10):
        load_voila(voila, "voila/render/three.ipynb", f"chart_voila_{time}")
        load_lab(lab, f"chart_lab_{time}")
    with voila_server(folder / "three.ipynb", preheat=True, pool_size=1) as preheated:
        for time in range(10):
            load_voila(preheated, "", f"chart_preheated_{time}", filled=time + 1)


def test_charts_do_not_wait_for_a_busy_kernel_and_share_one_library(lab, folder) -> None:
    with browser_tab(height=1500) as tab:
        tab.page.add_init_script(
            """globalThis.libraries = 0;
            const make = URL.createObjectURL;
            URL.createObjectURL = (blob) => { libraries += blob.size > 1e6; return make.call(URL, blob); };"""
        )
        tab.open_notebook(lab, "busy.ipynb")
        tab.run_all_cells()
        tab.wait_for_charts(1)  # while the third cell runs
        end = tab.page.locator(".jp-OutputArea-output", has_text=re.compile(r"end of \d+"))
        assert end.count() == 0
        (folder / "go").touch()
        tab.wait_for_charts(2)
        first = end.text_content()
        tab.restart_and_run_all()
        end.filter(has_not_text=first).wait_for()
        tab.wait_for_charts(2)
        tab.open_notebook(lab, "three.ipynb", reload=False)  # a second kernel on the same page
        tab.run_all_cells()
        tab.wait_for_charts(3)
        assert tab.page.evaluate("() => globalThis.libraries") == 1
        tab.shut_down_kernels(lab)
        tab.assert_clean()


def test_text_shows_as_typed(voila) -> None:
    with browser_tab() as tab:
        tab.page.goto(f"{voila.url}/voila/render/details.ipynb")
        tab.wait_for_charts(1)
        chart = tab.page.locator(".kvlab-chart").first
        chart.get_by_role("button", name="The data behind this picture as a table").click()
        table = chart.get_by_role("table")
        table.wait_for()
        assert [cell.text_content() for cell in table.locator("tbody td:first-child").all()] == HOSTILE
        assert [cell.text_content() for cell in table.locator("th").all()] == ["token", "n"]
        assert table.locator("caption").text_content() == "".join(HOSTILE)
        assert chart.locator(".kvlab-summary").text_content() == "".join(HOSTILE)
        assert chart.locator(".kvlab-plot").get_attribute("aria-label") == "".join(HOSTILE)
        assert [tick.text_content() for tick in chart.locator(".xtick text").all()] == HOSTILE
        assert chart.locator(".gtitle").text_content() == "".join(HOSTILE)
        tab.screenshot("chart_text")
        tab.page.get_by_role("button", name="Say").click()
        tab.page.get_by_text("Not now: <b>busy</b>.").wait_for()
        assert tab.charts()[0]["revision"] is None
        tab.assert_clean()


def test_a_chart_answers_pointer_and_keyboard_and_follows_its_container(voila) -> None:
    with browser_tab() as tab:
        tab.page.goto(f"{voila.url}/voila/render/details.ipynb?theme=dark")
        tab.page.get_by_text("theme dark").wait_for()
        tab.wait_for_charts(1)
        chart = tab.page.locator(".kvlab-chart").first
        bars = chart.locator(".points .point")
        for times in (1, 2):
            bars.nth(6).click(force=True)
            tab.page.get_by_text(f"clicked 6, {times} times").wait_for()

        tab.page.get_by_text("pointer at 6").wait_for()
        chart.locator(".kvlab-summary").hover()
        tab.page.get_by_text("pointer at None").wait_for()

        chart.get_by_role("button", name="Download this picture as PNG").focus()
        with tab.page.expect_download() as png:
            tab.page.keyboard.press("Enter")
        assert png.value.path().read_bytes().startswith(b"\x89PNG")
        tab.page.keyboard.press("Tab")
        with tab.page.expect_download() as svg:
            tab.page.keyboard.press("Enter")
        assert b"<svg" in svg.value.path().read_bytes()[:200]
        tab.page.keyboard.press("Tab")
        tab.page.keyboard.press("Space")
        chart.get_by_role("table").wait_for()

        tab.page.set_viewport_size({"width": 700, "height": 900})
        tab.page.wait_for_function("() => document.querySelector('.kvlab-chart .main-svg').clientWidth < 700")
        tab.page.get_by_role("button", name="Rush").click()  # the hidden chart is not drawn ...
        tab.page.get_by_text("Hidden").click()  # ... and opens with the last update
        tab.page.wait_for_function("() => document.querySelectorAll('.kvlab-chart')[1].dataset.kvlabDrawn === '21'")
        tab.screenshot("chart_dark")
        tab.assert_clean()


def test_a_page_without_plotly_says_so_and_draws_when_it_comes(voila) -> None:
    with browser_tab() as tab:
        tab.page.route("**/plotly.min.js", lambda route: route.fulfill(body=""))
        tab.page.goto(f"{voila.url}/voila/render/silent.ipynb")
        tab.page.get_by_text(re.compile("^plotly.js has not come from the notebook's kernel for 1 seconds")).wait_for()
        tab.screenshot("chart_late")
        tab.page.get_by_role("button", name="Ask again").click()
        tab.wait_for_charts(1)
        tab.assert_clean()


def test_a_picture_that_cannot_be_drawn_is_replaced_by_words(voila) -> None:
    with browser_tab() as tab:
        tab.page.goto(f"{voila.url}/voila/render/three.ipynb")
        tab.wait_for_charts(3)
        tab.page.evaluate(
            "async () => { globalThis.react = Plotly.react; Plotly.react = () => { throw new Error('no <b>room</b>'); }; }"
        )
        tab.page.get_by_role("button", name="Rush").click()
        tab.page.wait_for_function("() => document.querySelectorAll('.kvlab-chart [role=alert]').length === 3")
        assert {chart["words"] for chart in tab.charts()} == {"This picture could not be drawn: no <b>room</b>"}
        tab.screenshot("chart_failed")
        tab.page.evaluate("() => { Plotly.react = globalThis.react; }")
        tab.page.get_by_role("button", name="Rush").click()
        tab.wait_for_charts(3, 41)
        tab.assert_clean()


def test_a_page_that_was_busy_for_long_loses_no_update(voila) -> None:
    """anywidget gives up on a model whose module took more than two seconds, and drops what comes later."""
    with browser_tab() as tab:
        tab.page.add_init_script(
            """const make = URL.createObjectURL;
            let modules = 0;
            URL.createObjectURL = (blob) => {
                if (++modules <= 1) setTimeout(() => { const end = performance.now() + 2500; while (performance.now() < end); });
                return make.call(URL, blob);
            };"""
        )
        tab.page.goto(f"{voila.url}/voila/render/three.ipynb")
        rush_and_stream(tab)
