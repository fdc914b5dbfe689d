# A configuration file, no package:
# ruff: noqa: INP001
"""Voila's settings for the dashboards; read when JUPYTER_CONFIG_PATH names this folder (and JUPYTER_PATH, for the template)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

c = get_config()  # noqa: F821 - traitlets runs this file with it

# The template that asks no other host; a visitor may not choose one that does.
c.VoilaConfiguration.template = "kvlab"
c.VoilaConfiguration.allow_template_override = "NO"
c.VoilaConfiguration.theme = "light"

# The list of dashboards as a plain page: JupyterLab's one starts widgets without a kernel, which fails on the console.
c.VoilaConfiguration.classic_tree = True

# Visitors see neither code nor tracebacks.
c.VoilaConfiguration.strip_sources = True
c.VoilaConfiguration.show_tracebacks = False
c.VoilaExecutor.cell_error_instruction = (
    "Reload the page to try again. If it stays, whoever runs this server finds the reason in the server's log."
)

# Of JupyterLab's extensions those that draw widgets; each other one costs every visitor time, and some fail in Voila's page.
c.VoilaConfiguration.extension_allowlist = [
    "@voila-dashboards/widgets-manager8",
    "@jupyter-widgets/jupyterlab-manager",
    "anywidget",
]

# Serves plotly.js of the installed package as a file, so that the browser reads it while the kernel starts (see the template).
plotly = find_spec("plotly")
if plotly:
    c.VoilaConfiguration.extra_labextensions_path = [str(Path(plotly.origin).parent)]

# A kernel holds a model in memory. Its page ends it when it closes; one that only sleeps is ended after an hour without a click.
c.MappingKernelManager.cull_idle_timeout = 3600
c.MappingKernelManager.cull_interval = 60
c.MappingKernelManager.cull_connected = True

# The next kernel is warmed up when the page that took the last one stands, not while it loads.
c.VoilaKernelManager.fill_delay = 8.0

# For visitors from other machines set another address here, and put something in front that asks who they are.
c.Voila.ip = "127.0.0.1"
