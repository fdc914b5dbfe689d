"""How much memory is free, and refusing in words what cannot fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_CGROUPS = Path("/sys/fs/cgroup")


def free_memory(device: torch.device | str) -> int:
    """Bytes that can still be allocated on `device`.

    On a CPU this is what the system calls available, or less where a container (cgroup v1 or v2) allows less: on mybinder the
    machine has plenty and the notebook has 1 to 2 GB.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return max(0, min([_available(), *_cgroup_room(_CGROUPS, Path("/proc/self/cgroup"))]))


def require_memory(need: int, device: torch.device | str, what: str) -> None:
    """Raise `ModelError` if `need` bytes for `what` do not fit into the free memory of `device`."""
    free = free_memory(device)
    if need > free:
        msg = (
            f"{what} needs {in_words(need)} and only {in_words(free)} of memory are free on {device}: "
            "take a smaller model, a smaller dtype or another device, or end what else uses the memory."
        )
        raise ModelError(msg)


def in_words(num_bytes: float) -> str:
    """Write a number of bytes as people read it: ``538 MB``, ``16.1 GB``."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} GB"


def _available() -> int:
    try:
        import psutil
    except ImportError:  # bare machines with torch and nothing else; Linux says the same number itself
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        msg = "The free memory of this machine cannot be read: install psutil (pip install psutil)."
        raise ModelError(msg) from None
    return int(psutil.virtual_memory().available)


def _cgroup_room(root: Path, membership: Path) -> Iterator[int]:
    """Bytes left under every limit on memory that binds this process: its own cgroup's and its ancestors'."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = base / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(base):
                yield from _room(folder, *names)


def _room(folder: Path, limit_file: str, usage_file: str, cached: str) -> Iterator[int]:
    try:
        limit, usage = (folder / limit_file).read_text().strip(), int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return  # no such group here, or none with a limit
    if limit != "max":
        yield int(limit) - usage + int(stat.get(cached, 0))  # file pages that nobody uses are given back when asked for
