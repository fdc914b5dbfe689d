"""What several tests share: the embedded model, fetched for real into the user's own cache folder, and no hub."""

from __future__ import annotations

import os

# Before anything imports torch or transformers, and for the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may ask a hub
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # torch's threads spin while they wait; beside a browser that takes 10 times as long

import pytest


@pytest.fixture(scope="session")
def embedded():
    """The embedded model, loaded once for all tests (and fetched, the first time on a machine)."""
    import kvlab

    return kvlab.load_model()
