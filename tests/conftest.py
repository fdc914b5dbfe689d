"""What several tests share: the embedded model, fetched for real into the user's own cache folder, and no hub."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers: no test may ask a hub

import pytest


@pytest.fixture(scope="session")
def embedded():
    """The embedded model, loaded once for all tests (and fetched, the first time on a machine)."""
    import kvlab

    return kvlab.load_model()
