"""What the engine's rooms raise when a model cannot be had or cannot be used."""

from __future__ import annotations

from kvlab.engine.request import EngineError


class ModelError(EngineError):
    """A model cannot be fetched, loaded or run: one sentence that says what is wrong, where, and what to do."""
