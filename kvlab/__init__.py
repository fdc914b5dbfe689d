"""kvlab: see prefix caching happen on a real model.

Public names load on first use; ``import kvlab`` itself loads no torch, plotly or ipywidgets.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "BlockCache": "kvlab.cache.block_cache",
    "RadixCache": "kvlab.cache.radix_cache",
    "PlainCache": "kvlab.cache.plain_cache",
    "Space": "kvlab.cache.contract",
    "Engine": "kvlab.engine.engine",
    "Request": "kvlab.engine.request",
    "load_model": "kvlab.engine.models",
    "Lab": "kvlab.widgets.lab",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the table above holds strings only


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attribute can be anything
    if name not in _HOMES:
        msg = f"module 'kvlab' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
