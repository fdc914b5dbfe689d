"""GGUF files: how many parameters one holds, told from its header, and loading one as a dense transformers model."""

from __future__ import annotations

import functools
import math
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from kvlab.engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

# Sizes in bytes of GGUF's fixed metadata types, by their number in the format; 8 is a string, 9 an array.
_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


def count_parameters(path: Path) -> int:
    """Count the parameters in a GGUF file by its header alone (versions 2 and 3 of the format), in milliseconds.

    Raises
    ------
    ModelError
        if it is no GGUF file, or ends before its last tensor begins.
    """
    try:
        with path.open("rb") as file:
            return _count(file, path)
    except (EOFError, OSError, OverflowError, MemoryError, struct.error, KeyError) as error:
        msg = f"{path} is truncated or altered (its header cannot be read): download it again."
        raise ModelError(msg) from error


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a GGUF file through transformers as a dense model in `dtype`, with the tokenizer that it carries."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    here: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    with _reading_once():
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **here)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=dtype, quantization_config=GgufConfig(dequantize=True), **here
        )
    return model, tokenizer


@contextmanager
def _reading_once() -> Iterator[None]:
    """Let transformers parse the file's 100,000 strings once instead of three times, and build the table of names once.

    It parses for the tokenizer, the config and the weights, and asks for the same table at every module: two thirds of the time.
    """
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    before = {name: getattr(gguf, name) for name in names}
    try:
        for name in names:
            setattr(gguf, name, functools.cache(before[name]))
        yield
    finally:
        for name in names:
            setattr(gguf, name, before[name])


def _count(file: BinaryIO, path: Path) -> int:
    if _take(file, 4) != b"GGUF":
        msg = f"{path} is no GGUF file (it does not begin with the letters GGUF): name a .gguf file or a folder of safetensors."
        raise ModelError(msg)
    version, num_tensors, num_keys = struct.unpack("<IQQ", _take(file, 20))
    if version not in (2, 3):
        msg = f"{path} is GGUF version {version}, and versions 2 and 3 can be read: convert it anew with a current llama.cpp."
        raise ModelError(msg)
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(num_keys):
        key = _take(file, _number(file, "<Q"))
        kind = _number(file, "<I")
        if key == b"general.alignment" and kind == 4:
            alignment = _number(file, "<I")
        else:
            _skip(file, kind)
    total, last = 0, 0
    for _ in range(num_tensors):
        _take(file, _number(file, "<Q"))  # its name
        dims = _number(file, "<I")
        total += math.prod(struct.unpack(f"<{dims}Q", _take(file, 8 * dims)))
        _, offset = struct.unpack("<IQ", _take(file, 12))
        last = max(last, offset)
    begin = -(-file.tell() // alignment) * alignment
    if begin + last >= path.stat().st_size:
        msg = f"{path} is truncated (it ends before its last tensor): download it again."
        raise ModelError(msg)
    return total


def _take(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _number(file: BinaryIO, form: str) -> int:
    return int(struct.unpack(form, _take(file, struct.calcsize(form)))[0])


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        file.seek(_number(file, "<Q"), 1)
    elif kind == _ARRAY:
        inner, count = _number(file, "<I"), _number(file, "<Q")
        if inner in _FIXED:
            file.seek(_FIXED[inner] * count, 1)
        else:
            for _ in range(count):
                _skip(file, inner)
    else:
        file.seek(_FIXED[kind], 1)
