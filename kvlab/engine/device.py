"""Where a model runs and in which dtype, chosen by what the hardware can do."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from kvlab.engine.errors import ModelError

DTYPES = {
    **dict.fromkeys(("float32", "fp32", "f32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), torch.float16),
}


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device asked for, or the best one here: cuda, mps, cpu."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in {"cuda", "mps", "cpu"}:
        msg = f"There is no device {str(device)!r} for kvlab: name cuda, mps or cpu, or leave it out."
        raise ModelError(msg)
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            msg = (
                f"The device {found} is not here (this torch sees {count} CUDA devices): "
                "name another one, or install a CUDA build of torch."
            )
            raise ModelError(msg)
        return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    if found.type == "mps" and not torch.backends.mps.is_available():
        msg = "The device mps is not here (it is Apple's GPU): name another one, or leave it out."
        raise ModelError(msg)
    return torch.device(found.type)


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype asked for; by itself bfloat16 on GPUs and CPUs that multiply it in hardware, else float32.

    CPUs: AMX or AVX512-BF16 (without them bfloat16 takes 4 times as long as float32). CUDA: compute capability 8 and up.
    """
    if dtype is None:
        if device.type == "cpu":
            fast = _cpu_has_bf16()
        else:
            fast = device.type == "mps" or torch.cuda.get_device_capability(device)[0] >= 8
        return torch.bfloat16 if fast else torch.float32
    found = dtype if isinstance(dtype, torch.dtype) else DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None or found not in DTYPES.values():
        msg = f"A model cannot be run in {dtype!r}: name float32, bfloat16 or float16, or leave it out."
        raise ModelError(msg)
    return found


def _cpu_has_bf16() -> bool:
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # not Linux; torch's own look is private and differs between versions
        checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        return any(check() for check in checks if check)
    return flags is not None and not {"amx_bf16", "avx512_bf16"}.isdisjoint(flags[1].split())
