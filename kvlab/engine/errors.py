"""What the engine's rooms raise when a model cannot be had or cannot be used, and any failure in words."""

from __future__ import annotations

from kvlab.cache.contract import CacheError
from kvlab.engine.request import EngineError


class ModelError(EngineError):
    """A model cannot be fetched, loaded or run: one sentence that says what is wrong, where, and what to do."""


def in_words(error: BaseException) -> str:
    """Return the sentence that says what went wrong; for what nobody foresaw, its kind and how to see where it arose."""
    if isinstance(error, EngineError | CacheError):
        return str(error)
    if type(error).__name__ in {"MemoryError", "OutOfMemoryError"}:
        return "The memory ended: take a smaller model or pool, or end what else uses the memory."
    return f"A failure that kvlab did not foresee ({type(error).__name__}: {error}); KVLAB_DEBUG=1 shows where it arose."
