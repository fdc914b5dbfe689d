"""Make docs/01_four_situations.md: the notebook's prose with pictures of a live run, for readers without a kernel.

``make docs`` runs it: Voila, Chromium, the real model, the four situations one after the other.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import Tab, browser_tab, voila_server  # noqa: E402 - found through the path above

from kvlab.widgets import words  # noqa: E402
from kvlab.widgets.lab import VIEWS  # noqa: E402

NOTEBOOK = ROOT / "notebooks" / "01_four_situations.py"
PAGE = ROOT / "docs" / "01_four_situations.md"
PICTURES = ROOT / "docs" / "pictures"
SITUATIONS = (
    ("1-shared-first", "none", 32, "The same 1,000 tokens first"),
    ("2-timestamp-first", "before", 32, "A timestamp before them"),
    ("3-timestamp-after", "between", 32, "The timestamp before the question"),
    ("4-long-answer", "none", 200, "A long answer"),
)
PATIENCE = 300_000  # ms


def run(tab: Tab, timestamp: str, answer: int) -> str:
    """Run one situation from an empty cache and return the sentence that the page says."""
    ready = "() => [...document.querySelectorAll('.kvlab-left button')].some(b => b.textContent.trim() === 'Run' && !b.disabled)"
    tab.page.wait_for_function(ready, timeout=PATIENCE)
    tab.page.get_by_role("button", name=words.START_OVER, exact=True).click()
    tab.page.get_by_text(words.READY).wait_for(timeout=PATIENCE)
    tab.page.locator(".kvlab-control", has_text=words.TIMESTAMP).locator("select").select_option(
        label=words.TIMESTAMPS[timestamp]
    )
    field = tab.page.locator(".kvlab-control", has_text=words.ANSWER).locator("input")
    field.fill(str(answer))
    field.press("Tab")
    before = max(chart["revision"] or 0 for chart in tab.charts())
    tab.page.get_by_role("button", name=words.RUN, exact=True).click()
    tab.page.get_by_text(words.DONE).wait_for(timeout=PATIENCE)
    tab.wait_for_charts(len(VIEWS), before + 1)
    return tab.page.locator(".kvlab-result").inner_text()


def prose() -> list[str]:
    """Return the notebook's markdown cells, and its code cells as code."""
    cells = re.split(r"^# %%(.*)\n", NOTEBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    out = []
    for kind, body in zip(cells[::2], cells[1::2], strict=True):
        text = body.strip()
        out.append(re.sub(r"^# ?", "", text, flags=re.MULTILINE) if "markdown" in kind else f"```python\n{text}\n```")
    return out


def main() -> None:
    """Run all situations, keep their pictures, write the page."""
    PICTURES.mkdir(exist_ok=True)
    shown = []
    with voila_server(ROOT / "notebooks" / "dashboards" / "cache_lab.ipynb") as server, browser_tab(height=1100) as tab:
        tab.page.goto(server.url)
        tab.wait_for_charts(len(VIEWS))
        for name, timestamp, answer, title in SITUATIONS:
            sentence = run(tab, timestamp, answer)
            tab.page.locator(".kvlab-lab").screenshot(path=PICTURES / f"{name}.png")
            shown.append(f"### {title}\n\n{sentence}\n\n![{title}: {sentence}](pictures/{name}.png)")
    cells = prose()
    at = next(i for i, cell in enumerate(cells) if cell.startswith("```python")) + 1
    made = "*Made from [the notebook](../notebooks/01_four_situations.ipynb) by `make docs`; there you can press the buttons.*"
    PAGE.write_text("\n\n".join([*cells[:1], made, *cells[1:at], *shown, *cells[at:]]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
