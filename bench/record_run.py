"""Record the run that the labs show until their model is there: ``python bench/record_run.py`` writes it into the package."""

from __future__ import annotations

import threading

from kvlab.trace.files import RECORDED, save_traces
from kvlab.widgets.scene import LiveSource, Settings

source = LiveSource()
source.load(lambda _fraction, text: print(text))
warm = Settings(shared=200, answer=2)
source.run(warm, lambda *_: None, lambda: None, threading.Event())  # the very first pass pays for other things than caching
source.start_over()
source.run(Settings(), lambda _fraction, text: print(text), lambda: None, threading.Event())
RECORDED.mkdir(exist_ok=True)
path = RECORDED / "four_situations.jsonl.gz"
save_traces(path, {policy: engine.trace for policy, engine in source.engines.items()}, about=source.about)
print(path.name, f"{path.stat().st_size:,} bytes")
