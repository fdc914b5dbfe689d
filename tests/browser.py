"""Real servers and a real browser for tests: Voila, JupyterLab, and Chromium driven by Playwright, all on loopback."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import ConsoleMessage, Page, Request

ROOT = Path(__file__).resolve().parent.parent
SCREENSHOTS = ROOT / "screenshots"
STARTING = 60  # s that a server may take on a loaded machine
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]

# What JupyterLab and Voila themselves put on the console or fail to fetch, one by one, each with its reason; all else is ours.
NOISE: list[tuple[re.Pattern[str], str]] = [
    (
        re.compile(
            r"^net::ERR_ABORTED (GET|POST|PUT) http://127\.0\.0\.1:\d+/(lab/)?api/(contents|kernels|sessions|terminals|workspaces)\b"
        ),
        "JupyterLab polls its folders, kernels and workspaces; leaving the page cuts off the request under way",
    ),
    (
        re.compile(r"^net::ERR_ABORTED POST http://127\.0\.0\.1:\d+/voila/api/shutdown/[\w-]+$"),
        "Voila's page asks for the end of its kernel as it is left, and does not stay for the answer",
    ),
    (
        re.compile(r"^net::ERR_ABORTED GET http://127\.0\.0\.1:\d+/static/favicons/favicon-busy-\d\.ico$"),
        "JupyterLab changes the icon of its tab while a kernel works, sometimes before the one before has come",
    ),
]


def chromium() -> str:
    """Where Chromium is: $CHROMIUM, or on PATH. Fails in words where there is none."""
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "/usr/bin/chromium"]
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        msg = (
            "The browser tests need Chromium and find none. On Debian or Ubuntu: apt-get install chromium. "
            "Elsewhere install Chromium or Chrome, and name it in the variable CHROMIUM if it is not on PATH."
        )
        raise AssertionError(msg)
    return path


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A running server: its address, its folder, and what it has written so far."""

    url: str
    folder: Path
    log_file: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")


@contextmanager
def _server(command: list[str], folder: Path, url: str, env: dict[str, str] | None) -> Iterator[Server]:
    """Start `command`, wait until `url` answers, and end it by its own process id."""
    with TemporaryDirectory(prefix="kvlab-server-") as home:
        own = {
            "JUPYTER_PATH": str(ROOT / "etc" / "jupyter"),
            "JUPYTER_CONFIG_PATH": str(ROOT / "etc" / "jupyter"),
            # nothing of the person who runs the tests: no settings, no workspaces, no history
            **{f"JUPYTER_{what}_DIR": f"{home}/{what.lower()}" for what in ("CONFIG", "DATA", "RUNTIME")},
            **{f"JUPYTERLAB_{what}_DIR": f"{home}/{what.lower()}" for what in ("SETTINGS", "WORKSPACES")},
            "IPYTHONDIR": f"{home}/ipython",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
        }
        log_file = Path(home) / "log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **own, **(env or {})}, cwd=home
            )
        server = Server(url, folder, log_file, process)
        try:
            deadline = time.monotonic() + STARTING
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    msg = f"The server did not start: {' '.join(command)}\n{server.log}"
                    raise AssertionError(msg)
                time.sleep(0.1)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - an address of ours
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@contextmanager
def voila_server(
    path: Path, *, preheat: bool = False, pool_size: int = 2, env: dict[str, str] | None = None, options: tuple[str, ...] = ()
) -> Iterator[Server]:
    """Serve a folder of notebooks, or one notebook, with Voila as `make dashboards` does. Preheated: waits for a full pool."""
    port = free_port()
    command = [sys.executable, "-m", "voila", str(path), "--no-browser", f"--port={port}", "--Voila.port_retries=0", *options]
    if preheat:
        command += ["--preheat_kernel=True", f"--pool_size={pool_size}"]
    folder = path if path.is_dir() else path.parent
    # a single notebook is at /, where a request would start a kernel
    with _server(command, folder, f"http://127.0.0.1:{port}/voila/static/", env) as server:
        server.url = f"http://127.0.0.1:{port}"
        if preheat:
            wait_for_pools(server, len(list(path.glob("*.ipynb"))) if path.is_dir() else 1)
        yield server


def wait_for_pools(server: Server, notebooks: int = 1, fillings: int = 1) -> None:
    """Wait until Voila has filled the kernel pools of that many notebooks, each that many times."""
    deadline = time.monotonic() + 120
    while server.log.count("is filled with") < notebooks * fillings:
        if time.monotonic() > deadline:
            msg = f"Voila's pool of kernels was not filled:\n{server.log}"
            raise AssertionError(msg)
        time.sleep(0.1)


@contextmanager
def lab_server(folder: Path, *, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Serve a folder with JupyterLab as `make lab` does, without a token."""
    port = free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={folder}"]
    with _server(command, folder, f"http://127.0.0.1:{port}/api", env) as server:
        server.url = f"http://127.0.0.1:{port}"
        yield server


@dataclass
class Tab:
    """A page of the browser, and all that happened on it."""

    page: Page
    requests: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("websocket", lambda socket: self.requests.append(socket.url))
        self.page.on("requestfailed", self._failed)
        self.page.on(
            "response", lambda r: self.failures.append(f"{r.status} {r.request.method} {r.url}") if r.status >= 400 else None
        )
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error.stack or error.message}"))

    def _failed(self, request: Request) -> None:
        self.failures.append(f"{request.failure} {request.method} {request.url}")

    def _said(self, message: ConsoleMessage) -> None:
        self.console.append(f"{message.type}: {message.text}")
        if message.type == "error":
            self.errors.append(f"console: {message.text} ({message.location.get('url', '')})")

    def assert_clean(self) -> None:
        """Fail on a request to any other host, a failed request, or an error on the console; NOISE lists the exceptions."""
        elsewhere = [url for url in self.requests if not _is_here(url)]
        assert not elsewhere, f"The page asked other hosts: {elsewhere}"
        troubles = [text for text in self.failures + self.errors if not any(noise.search(text) for noise, _ in NOISE)]
        assert not troubles, "The page had errors:\n" + "\n".join(troubles)

    def screenshot(self, name: str) -> Path:
        """Keep the page as screenshots/NAME.png, to the end of what scrolls in it (as Voila and JupyterLab do)."""
        SCREENSHOTS.mkdir(exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        size = self.page.viewport_size
        hidden = self.page.evaluate(
            """() => Math.max(0, ...[...document.querySelectorAll("html, body, body *")]
                .filter(node => node.clientHeight > innerHeight / 2 && /auto|scroll/.test(getComputedStyle(node).overflowY))
                .map(node => node.scrollHeight - node.clientHeight))"""
        )
        self.page.set_viewport_size({"width": size["width"], "height": min(size["height"] + hidden, 6000)})
        self.page.wait_for_timeout(300)  # for what draws itself anew
        self.page.screenshot(path=path)
        self.page.set_viewport_size(size)
        return path

    def charts(self) -> list[dict[str, Any]]:
        """All charts of the page in order: alt, revision (None while words stand there), words."""
        return self.page.evaluate(
            """() => [...document.querySelectorAll(".kvlab-chart")].map(chart => ({
                alt: chart.querySelector(".kvlab-plot").getAttribute("aria-label"),
                revision: chart.dataset.kvlabDrawn === undefined ? null : Number(chart.dataset.kvlabDrawn),
                words: chart.querySelector(".kvlab-note").textContent,
            }))"""
        )

    def wait_for_charts(self, count: int, revision: int = 1, timeout: float = 60) -> None:
        """Wait until `count` charts are visible and each shows at least `revision`; fails with what they show instead."""
        try:
            self.page.wait_for_function(
                """([count, revision]) => {
                    const charts = [...document.querySelectorAll(".kvlab-chart")].filter(chart => chart.clientWidth);
                    return charts.length >= count && charts.every(chart => Number(chart.dataset.kvlabDrawn ?? -1) >= revision);
                }""",
                arg=[count, revision],
                timeout=timeout * 1000,
            )
        except Exception as error:
            msg = f"Waited {timeout} s for {count} charts at revision {revision}; there are {self.charts()}, errors {self.errors}"
            raise AssertionError(msg) from error

    def open_notebook(self, server: Server, name: str, *, reload: bool = True) -> None:
        """Open a notebook in JupyterLab and wait for its kernel; without `reload` from the file browser of the open page."""
        if reload:
            self.page.goto(f"{server.url}/lab/tree/{name}?reset")  # none of the notebooks that were open before
        else:
            self.page.get_by_role("listitem", name=f"Name: {name}").dblclick()
        panel = self.page.locator(".jp-NotebookPanel:visible")
        panel.locator(".jp-Cell").first.wait_for(timeout=60_000)
        panel.locator(".jp-KernelName", has_text="Python 3").wait_for(timeout=60_000)
        bar = self.page.locator("#jp-main-statusbar")
        bar.get_by_text(name, exact=True).wait_for(timeout=60_000)
        bar.get_by_text("| Idle").wait_for(timeout=60_000)

    def run_all_cells(self) -> None:
        """Choose Run > Run All Cells from JupyterLab's menu, and see that it starts."""
        self._choose("Run", "Run All Cells")
        prompt = self.page.locator(".jp-NotebookPanel:visible .jp-CodeCell .jp-InputPrompt").first
        prompt.filter(has_text=re.compile(r"\[(\*|\d+)\]")).wait_for(timeout=60_000)

    def restart_and_run_all(self) -> None:
        """Choose Kernel > Restart Kernel and Run All Cells, and confirm."""
        self._choose("Kernel", "Restart Kernel and Run All Cells…")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.page.locator(".jp-Dialog").wait_for(state="detached")

    def save_notebook(self) -> None:
        """Choose File > Save Notebook, and wait until it is saved."""
        with self.page.expect_response(lambda response: response.request.method == "PUT" and "/api/contents/" in response.url):
            self._choose("File", "Save Notebook")

    def shut_down_kernels(self, server: Server) -> None:
        """End all kernels of a JupyterLab server, so that the next page starts afresh."""
        sessions = self.page.request.get(f"{server.url}/api/sessions").json()
        token = next(cookie["value"] for cookie in self.page.context.cookies() if cookie["name"] == "_xsrf")
        self.page.goto("about:blank")
        for session in sessions:
            self.page.request.delete(f"{server.url}/api/sessions/{session['id']}", headers={"X-XSRFToken": token})

    def _choose(self, menu: str, item: str) -> None:
        self.page.get_by_role("menuitem", name=menu, exact=True).click()
        self.page.get_by_role("menuitem", name=item).first.click()


def _is_here(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in {"data", "blob", "about"} or parts.hostname in {"127.0.0.1", "localhost"}


@contextmanager
def browser_tab(*, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Tab]:
    """Open a page in a browser of its own; nothing is shared between two of them."""
    from playwright.sync_api import sync_playwright

    executable = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        try:
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", accept_downloads=True
            )
            tab = Tab(context.new_page())
            try:
                yield tab
            except BaseException:
                tab.screenshot("failed")  # what the page looked like then
                raise
        finally:
            browser.close()
