"""ctrl-C that waits for the end of a step."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def patient_interrupt() -> Iterator[threading.Event]:
    """Let ctrl-C wait for the end of the step, so that no cache is interrupted half way through; the second one does not wait."""
    pressed = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield pressed
        return

    def press(signum: int, frame: Any) -> None:  # noqa: ANN401 - a frame object
        if pressed.is_set():
            signal.default_int_handler(signum, frame)
        pressed.set()

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed.is_set():
        raise KeyboardInterrupt
