"""What visitors of the dashboards see when all is well and when not: Voila with the settings and template of etc/jupyter."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import nbformat
import pytest
from browser import ROOT, browser_tab, voila_server

FINE = ["import ipywidgets as w\nw.Label('All is well')"]
BROKEN = ["import ipywidgets as w\nw.Label('Before')", "hidden_name = 42\nraise RuntimeError('/a/hidden_name/path')"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("dashboards")
    for name, cells in {"fine_page": FINE, "broken": BROKEN}.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, path / f"{name}.ipynb")
    return path


@pytest.fixture(scope="module")
def voila(folder):
    with voila_server(folder) as server:
        yield server


def test_the_list_of_dashboards_leads_to_them_and_nothing_asks_other_hosts(voila) -> None:
    with browser_tab(height=500) as tab:
        tab.page.goto(voila.url)
        tab.screenshot("dashboards_list")
        tab.page.get_by_role("link", name="Fine page").click()
        tab.page.get_by_text("All is well").wait_for()
        tab.page.goto(f"{voila.url}/voila/render/fine_page.ipynb?template=lab")  # Voila's own template would ask a CDN
        tab.page.get_by_text("All is well").wait_for()
        tab.assert_clean()


def test_an_error_is_said_without_code_or_traceback(voila) -> None:
    with browser_tab(height=500) as tab:
        tab.page.goto(f"{voila.url}/voila/render/broken.ipynb")
        tab.page.get_by_text("There was an error when executing cell").wait_for()
        tab.page.get_by_text("Before").wait_for()
        source = tab.page.content()
        assert "hidden_name" not in source
        assert "Traceback" not in source
        tab.screenshot("dashboards_broken")
        tab.assert_clean()


def test_an_unknown_address_is_said_in_words(voila) -> None:
    with browser_tab(height=500) as tab:
        tab.page.goto(f"{voila.url}/voila/render/nothing.ipynb")
        tab.page.get_by_text("There is no dashboard at this address.").wait_for()
        tab.screenshot("dashboards_404")
        tab.page.get_by_role("link", name="All dashboards").click()
        tab.page.get_by_role("link", name="Fine page").wait_for()


def test_an_idle_kernel_is_ended_and_its_page_says_so(folder) -> None:
    options = ("--MappingKernelManager.cull_idle_timeout=3", "--MappingKernelManager.cull_interval=1")
    notebook = folder / "fine_page.ipynb"
    with voila_server(notebook, preheat=True, pool_size=1, options=options) as server, browser_tab(height=500) as tab:
        time.sleep(5)  # longer than an idle kernel lives: the one in the pool is spared
        assert "Culling 'idle' kernel" not in server.log
        tab.page.goto(server.url)
        tab.page.get_by_text("This page has been idle for long, so its kernel was ended.").wait_for(timeout=60_000)
        assert server.log.count("Culling 'idle' kernel") == 1
        tab.screenshot("dashboards_idle")


def test_a_port_in_use_is_said_in_words(folder) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "voila", str(folder), "--no-browser", f"--port={port}", "--Voila.port_retries=0"]
        command.append(f"--Voila.config_file_paths={ROOT / 'etc' / 'jupyter'}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"The port {port} is already in use" in done.stderr
    assert "Traceback" not in done.stderr
