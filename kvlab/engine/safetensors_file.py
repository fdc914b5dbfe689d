"""Safetensors files: how many parameters one holds and whether it is whole, told from its header."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING

from kvlab.engine.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path


def count_parameters(file: Path) -> int:
    """Count the parameters in a safetensors file by its header alone, in milliseconds.

    Raises
    ------
    ModelError
        if it is no safetensors file, or not as long as its header says.
    """
    try:
        with file.open("rb") as data:
            size = file.stat().st_size
            (length,) = struct.unpack("<Q", data.read(8))
            header = json.loads(data.read(length) if length < size else b"")
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = int(8 + length + max(entry["data_offsets"][1] for entry in tensors))
        total = int(sum(math.prod(entry["shape"]) for entry in tensors))
    except (OSError, ValueError, struct.error, AttributeError, KeyError, TypeError, IndexError) as error:
        msg = f"{file} is truncated or altered (its header cannot be read): get it again."
        raise ModelError(msg) from error
    if end != size:
        msg = f"{file} is truncated or altered ({size:,} bytes instead of {end:,}): get it again."
        raise ModelError(msg)
    return total
