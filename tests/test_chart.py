"""Charts and their tables without a browser: what a trait holds, what is refused, what a notebook keeps."""

from __future__ import annotations

import gzip
import json
import threading

import nbclient
import nbformat
import numpy as np
import plotly.graph_objects as go
import pytest

from kvlab.widgets.chart import Chart, plotly_js
from kvlab.widgets.table import build_table, figure_data, plain_text

HOSTILE = ["<script>alert(1)</script>", "a<br>b", "$x$", "🙂", "推論", "a & b", 'say "hi"']


def bar(step: int = 1) -> go.Figure:
    return go.Figure(go.Bar(x=["a", "b"], y=[step, 2]), layout={"title": {"text": f"Step {step}"}})


def test_show_holds_the_figure_and_counts() -> None:
    chart = Chart()
    assert chart.revision == 0
    chart.show(bar(1))
    chart.show(bar(7), summary="Seven.")
    assert (chart.revision, chart.alt, chart.summary, chart.filename) == (2, "Step 7", "Seven.", "Step-7")
    assert chart.figure["data"][0]["y"] == [7, 2]
    json.dumps(chart.figure)  # a trait travels as JSON


def test_arrays_with_holes_travel() -> None:
    chart = Chart(go.Figure(go.Heatmap(z=np.array([[1.0, np.nan], [3.0, 4.0]]))))
    json.dumps(chart.figure, allow_nan=False)


def test_what_is_no_figure_is_refused_in_words_and_nothing_is_lost() -> None:
    chart = Chart(bar(1), alt="Bars")
    with pytest.raises(TypeError, match="a mapping with data and layout, not int"):
        chart.show(3)
    with pytest.raises(ValueError, match="nonsense"):
        chart.show({"data": [{"type": "bar", "nonsense": 1}]})
    assert (chart.revision, chart.alt, chart.figure["data"][0]["y"]) == (1, "Bars", [1, 2])


def test_words_stand_until_the_next_figure() -> None:
    chart = Chart(bar())
    chart.say("The model is being loaded.")
    assert chart.message == "The model is being loaded."
    chart.show(bar())
    assert chart.message == ""


def test_threads_lose_no_revision() -> None:
    chart = Chart()
    threads = [threading.Thread(target=lambda: [chart.show(bar(n)) for n in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chart.revision == 40


def test_a_table_is_made_only_while_it_is_open() -> None:
    calls = []

    def rows() -> dict[str, list[int]]:
        calls.append(1)
        return {"block": [1, 2]}

    chart = Chart(bar(), table=rows)
    assert (calls, chart.table) == ([], {})
    chart.data_open = True
    assert chart.table == {"columns": ["block"], "rows": [[1], [2]], "total": 2}
    chart.show(bar(), table={"block": [3]})
    assert chart.table["rows"] == [[3]]
    chart.data_open = False
    chart.show(bar(), table=rows)
    assert len(calls) == 1


def test_a_table_that_fails_says_why() -> None:
    chart = Chart(bar(), table=lambda: {"a": [1], "b": []})
    chart.data_open = True
    assert chart.table["error"].startswith("The data could not be listed: The columns of a table must be of one length")


def test_a_figure_without_a_table_lists_its_points() -> None:
    figure = go.Figure(
        [
            go.Scatter(x=[1, None, 2], y=[3, None, 4], text=["&lt;script&gt;", None, "<b>bold</b>"], name="line"),
            go.Heatmap(z=[[1, None], [np.nan, 4]], x=["left", "right"]),
        ]
    )
    assert figure_data(figure) == [
        {"trace": "line", "x": 1, "y": 3, "text": "<script>"},
        {"trace": "line", "x": 2, "y": 4, "text": "bold"},
        {"trace": "heatmap 2", "x": "left", "y": 0, "z": 1.0},
        {"trace": "heatmap 2", "x": "right", "y": 1, "z": 4.0},
    ]


def test_tables_of_columns_and_of_rows_are_the_same() -> None:
    columns = {"token": HOSTILE, "n": np.arange(7), "share": [0.5] * 6 + [float("nan")]}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    table = build_table(columns)
    assert table == build_table(rows)
    assert [row[0] for row in table["rows"]] == HOSTILE
    json.dumps(table, allow_nan=False)


def test_a_long_table_says_how_long_it_is() -> None:
    table = build_table({"n": range(5000)}, most_rows=10)
    assert (len(table["rows"]), table["total"]) == (10, 5000)


@pytest.mark.parametrize(
    ("shown", "plain"),
    [("<b>a</b><br>b", "a b"), ("&lt;br&gt;", "<br>"), ("<script>x</script>", "<script>x</script>"), ("1 < 2 > 0", "1 < 2 > 0")],
)
def test_plain_text_takes_away_what_plotly_draws_and_no_more(shown: str, plain: str) -> None:
    assert plain_text(shown) == plain


def test_plotly_js_is_the_installed_one() -> None:
    assert b"plotly.js v" in gzip.decompress(plotly_js())[:100]


def test_a_saved_notebook_holds_the_figure_and_not_the_library() -> None:
    notebook = nbformat.v4.new_notebook()
    code = (
        "import plotly.graph_objects as go; from kvlab.widgets.chart import Chart; Chart(go.Figure(go.Bar(y=[1, 2])), alt='Bars')"
    )
    notebook.cells = [nbformat.v4.new_code_cell(code)]
    nbclient.NotebookClient(notebook, store_widget_state=True, kernel_name="python3").execute()
    states = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    assert any("figure" in model["state"] for model in states.values())
    assert len(json.dumps(states)) < 100_000
    assert notebook.cells[0].outputs[0].data["text/plain"] == "Chart('Bars')"
