"""Notebooks: each .ipynb is made from the percent-format .py beside it, and is committed without outputs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
NAMES = sorted({p.relative_to(FOLDER).with_suffix("").as_posix() for kind in ("py", "ipynb") for p in FOLDER.rglob(f"*.{kind}")})
NAMES = [name for name in NAMES if ".ipynb_checkpoints" not in name]


def committed(path: Path) -> str:
    """Text as git has it: whoever runs a notebook in JupyterLab saves outputs into the file on disk, which is no fault yet."""
    shown = subprocess.run(["git", "show", f":./{path.name}"], cwd=path.parent, capture_output=True, check=False)
    return (shown.stdout if shown.returncode == 0 else path.read_bytes()).decode()


def test_there_are_notebooks():
    assert {"01_four_situations", "dashboards/cache_lab"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_script_and_notebook_are_equal(name):
    script = jupytext.read(FOLDER / f"{name}.py", fmt="py:percent")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    how = f"notebooks/{name}: .py and .ipynb differ; `make notebooks` makes the .ipynb anew from the .py"
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in script.cells], how
    tags = [[c.metadata.get("tags", []) for c in nb.cells] for nb in (notebook, script)]
    assert tags[0] == tags[1], how
    assert notebook.metadata.kernelspec == script.metadata.kernelspec, how


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_committed_without_outputs(name):
    notebook = nbformat.reads(committed(FOLDER / f"{name}.ipynb"), as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code, "a notebook of prose alone shows nothing live"
    assert not [cell.source for cell in code if cell.outputs], (
        "outputs are committed: clear them in JupyterLab's Edit menu, then save"
    )
    assert not [cell.source for cell in code if cell.execution_count is not None], "execution counts are committed"
    assert "widgets" not in notebook.metadata, "the state of widgets is committed"
