"""The pages that people open, on the real model, in a real browser: Voila plain and preheated, and JupyterLab."""

from __future__ import annotations

import re
import shutil

import pytest
from browser import ROOT, browser_tab, lab_server, voila_server

from kvlab.widgets import words
from kvlab.widgets.lab import VIEWS

pytestmark = pytest.mark.timeout(900)

DASHBOARD = ROOT / "notebooks" / "dashboards" / "cache_lab.ipynb"
MODEL_LOADS = 120_000  # ms that a busy machine may take
READY = "() => [...document.querySelectorAll('.kvlab-left button')].some(b => b.textContent.trim() === 'Run' && !b.disabled)"


def press(tab, name):
    tab.page.get_by_role("button", name=name, exact=True).click()


def choose(tab, label, value):
    field = tab.page.locator(".kvlab-control", has_text=label)
    if isinstance(value, str):
        field.locator("select").select_option(label=value)
    else:
        field.locator("input").fill(str(value))
        field.locator("input").press("Tab")


def settled(tab):
    tab.page.get_by_text(words.DONE).wait_for(timeout=MODEL_LOADS)


def sentence(tab):
    return tab.page.locator(".kvlab-result").inner_text()


def revisions(tab):
    return [chart["revision"] for chart in tab.charts()]


def no_sideways_scrolling(tab):
    widths = tab.page.evaluate("() => [document.documentElement.scrollWidth, window.innerWidth]")
    assert widths[0] <= widths[1], f"the page is {widths[0]} wide in a window of {widths[1]}"


def use(tab, name):
    """Watch the recorded run give way to the model, and run it; keep pictures."""
    tab.wait_for_charts(len(VIEWS), timeout=60)
    assert words.RECORDED in tab.page.locator(".kvlab-about").inner_text()
    assert "992 of 1,040" in sentence(tab)
    tab.screenshot(f"{name}-1-recorded")
    tab.page.wait_for_function(READY, timeout=MODEL_LOADS)

    before = revisions(tab)
    choose(tab, words.ANSWER, 4)
    press(tab, words.RUN)
    settled(tab)
    assert re.match(r"Request \S+: vLLM reuses 992 of 1,040 tokens, SGLang 1,000\.", sentence(tab))
    tab.wait_for_charts(len(VIEWS), max(before) + 1)
    assert all(now > then for now, then in zip(revisions(tab), before, strict=True)), "a chart was not drawn anew"
    tab.screenshot(f"{name}-2-reused")
    no_sideways_scrolling(tab)


def use_more(tab, name):
    """Change the layout, do something wrong, start over."""
    choose(tab, words.TIMESTAMP, words.TIMESTAMPS["before"])
    press(tab, words.RUN)
    tab.page.get_by_text(words.DONE).wait_for(state="hidden", timeout=MODEL_LOADS)
    settled(tab)
    assert re.match(r"Request \S+: vLLM reuses 0 of 1,\d+ tokens, SGLang 0\.", sentence(tab))
    tab.screenshot(f"{name}-3-timestamp-first")

    choose(tab, words.BLOCK_SIZE, 7)
    press(tab, words.RUN)
    tab.page.get_by_role("alert").filter(has_text="7").wait_for(timeout=30_000)
    tab.screenshot(f"{name}-4-refused")
    choose(tab, words.BLOCK_SIZE, 16)
    press(tab, words.START_OVER)
    tab.page.get_by_text(words.READY).wait_for(timeout=30_000)
    no_sideways_scrolling(tab)


def look(tab):
    """Wait for the recorded run only: the page is there at once, whatever the model does."""
    tab.wait_for_charts(len(VIEWS), timeout=60)
    assert "992 of 1,040" in sentence(tab)
    tab.assert_clean()


def test_voila(embedded):
    with voila_server(DASHBOARD) as server:
        with browser_tab() as tab:
            tab.page.goto(server.url)
            use(tab, "voila")
            use_more(tab, "voila")
            tab.assert_clean()
        with browser_tab() as tab:
            tab.page.goto(f"{server.url}/?theme=dark")
            look(tab)
            dark = """() => [...document.querySelectorAll(".kvlab-chart .main-svg:first-child")]
                .every(svg => getComputedStyle(svg).backgroundColor.match(/\\d+/g).slice(0, 3).every(part => part < 60))"""
            tab.page.wait_for_function(dark, timeout=30_000)
            tab.screenshot("voila-dark")


def test_voila_preheated(embedded):
    with voila_server(DASHBOARD, preheat=True, pool_size=1) as server:
        with browser_tab() as tab:
            tab.page.goto(server.url)
            use(tab, "voila-preheated")
            tab.assert_clean()
        with browser_tab() as tab:
            tab.page.goto(server.url)
            look(tab)


def test_jupyterlab(embedded, tmp_path):
    shutil.copy(ROOT / "notebooks" / "01_four_situations.ipynb", tmp_path)
    with lab_server(tmp_path) as server:
        for turn in (1, 2):
            with browser_tab(width=1280, height=1400) as tab:
                tab.open_notebook(server, "01_four_situations.ipynb")
                tab.run_all_cells()
                tab.page.locator(".kvlab-lab").scroll_into_view_if_needed(timeout=60_000)
                if turn == 1:
                    use(tab, "jupyterlab")
                else:
                    look(tab)
                tab.assert_clean()


@pytest.mark.soak
@pytest.mark.parametrize("preheat", [False, True], ids=["plain", "preheated"])
def test_voila_ten_times(embedded, preheat):
    with voila_server(DASHBOARD, preheat=preheat) as server:
        for _ in range(10):
            with browser_tab() as tab:
                tab.page.goto(server.url)
                tab.wait_for_charts(len(VIEWS), timeout=60)
                tab.page.wait_for_function(READY, timeout=MODEL_LOADS)
                before = revisions(tab)
                choose(tab, words.ANSWER, 2)
                press(tab, words.RUN)
                settled(tab)
                tab.wait_for_charts(len(VIEWS), max(before) + 1)
                assert "vLLM reuses 992 of 1,040 tokens, SGLang 1,000." in sentence(tab)
                tab.assert_clean()


@pytest.mark.soak
def test_jupyterlab_ten_times(embedded, tmp_path):
    shutil.copy(ROOT / "notebooks" / "01_four_situations.ipynb", tmp_path)
    with lab_server(tmp_path) as server:
        for _ in range(10):
            with browser_tab(height=1400) as tab:
                tab.open_notebook(server, "01_four_situations.ipynb")
                tab.run_all_cells()
                tab.page.locator(".kvlab-lab").scroll_into_view_if_needed(timeout=60_000)
                tab.wait_for_charts(len(VIEWS), timeout=60)
                tab.page.wait_for_function(READY, timeout=MODEL_LOADS)
                before = revisions(tab)
                choose(tab, words.ANSWER, 2)
                press(tab, words.RUN)
                settled(tab)
                tab.wait_for_charts(len(VIEWS), max(before) + 1)
                tab.assert_clean()
