"""``python -m kvlab`` is the command line."""

from kvlab.cli import app

app(prog_name="kvlab")
