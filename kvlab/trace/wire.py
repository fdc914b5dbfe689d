"""Events as the engines put them on the wire: ``[stored, hashes, parent]``, ``[removed, hashes]``, ``[cleared]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlab.cache import events as ev

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvlab.cache.events import Event


def wire(events: Iterable[Event]) -> list[list[Any]]:
    """Return what an engine says to its listeners about the events of ONE operation.

    vLLM says one ``stored`` an allocation and one ``removed`` a block (docs/vllm.md 17). SGLang lets neighbours merge: a
    ``removed`` joins the ``removed`` before it, a ``stored`` the one before it whose last hash is its parent (docs/sglang.md
    25; of the same salt therefore: a salt starts another chain of hashes).

    Parameters
    ----------
    events : iterable of Event
        in order, of either cache.

    Returns
    -------
    list of list
        plain data: block hashes are ints, the parent of a first block is None.
    """
    out: list[list[Any]] = []
    for event in events:
        match event:
            case ev.Keyed(hashes=hashes, parent=parent):
                out.append(["stored", list(hashes), parent])
            case ev.Unkeyed(hashes=hashes):
                out += [["removed", [hash]] for hash in hashes]
            case ev.Inserted(hashes=hashes, parent_hash=parent):
                if out and out[-1][0] == "stored" and out[-1][1][-1] == parent:
                    out[-1][1].extend(hashes)
                else:
                    out.append(["stored", list(hashes), parent])
            case ev.Evicted(hashes=hashes):
                if out and out[-1][0] == "removed":
                    out[-1][1].extend(hashes)
                else:
                    out.append(["removed", list(hashes)])
            case ev.Cleared(wire=True):
                out.append(["cleared"])
    return out
