"""Unpack a GGUF file into a folder of safetensors; `kvlab.engine.embedded` runs this in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write `gguf` as safetensors in `dtype`, with tokenizer and chat template; print how far it is, for the one who waits."""
    _say(0.0, "Starting transformers")
    import torch
    import transformers

    from kvlab.engine.gguf_file import load_gguf

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    _say(0.1, "Unpacking the weights")
    model, tokenizer = load_gguf(gguf, getattr(torch, dtype))
    _say(0.9, "Writing safetensors")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _say(fraction: float, text: str) -> None:
    sys.stdout.write(f"{fraction} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
