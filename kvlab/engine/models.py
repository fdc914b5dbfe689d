"""Loading a model: the embedded default, a hub id, a local folder or GGUF file, or a tiny one made in memory.

What comes out is transformers' own model with its own attention; that the engine can run it is the probe's business (probe.py).
A hub is asked only if the user names a hub model.
"""

from __future__ import annotations

import contextlib
import difflib
import html
import os
import re
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from kvlab.engine import embedded, gguf_file, safetensors_file
from kvlab.engine.device import choose_device, choose_dtype
from kvlab.engine.errors import ModelError
from kvlab.engine.layout import arrange
from kvlab.engine.memory import free_memory, require_memory
from kvlab.engine.tiny import TINY, make_tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvlab.engine.embedded import Progress

    Parts = tuple[PreTrainedModel, PreTrainedTokenizerBase | None]

__all__ = ["Loaded", "ModelError", "choose_device", "choose_dtype", "free_memory", "load_model"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")

_loading = threading.RLock()
_models: WeakValueDictionary[tuple[str, ...], Any] = WeakValueDictionary()
_tokenizers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by model: as long as that is in use


@dataclass(eq=False)
class Loaded:
    """A model as transformers loads it, with what one must know to run it.

    Attributes
    ----------
    model : PreTrainedModel
        in eval mode, on `device`, with its own attention; shared by all who load the same in this process.
    tokenizer : PreTrainedTokenizerBase or None
        None for the tiny random models and for folders that hold none.
    name : str
        what it was asked for by.
    source : str
        the folder or file that it came from, the hub id, or "random weights".
    kv_bytes_per_token : int
        bytes of K and V of one token over all layers, in `dtype`.
    max_position : int or None
        longest sequence that the model knows positions for; None where it has no limit.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    device: torch.device
    dtype: torch.dtype
    source: str
    num_params: int
    kv_bytes_per_token: int
    vocab_size: int
    max_position: int | None

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.name}: {self.num_params / 1e6:,.1f} million parameters in {dtype} on {self.device}, "
            f"{self.kv_bytes_per_token:,} bytes of K and V a token"
        )

    def _repr_html_(self) -> str:
        name, rest = repr(self).split(": ", 1)
        return f"<b>{html.escape(name)}</b>: {html.escape(rest)}"


def load_model(
    name: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load a causal language model as transformers does.

    A second load of the same model, dtype and device in one process shares the weights of the first while those are in use.

    Parameters
    ----------
    name : str, path or None
        None: the embedded model, fetched first if it is not there. Else a folder with config.json and safetensors, a .gguf file
        (unpacked to `dtype`), a hub id ``org/name`` (only then is the hub asked), or one of the tiny models of tiny.py.
    device : "cuda", "mps", "cpu" or torch.device, optional
        by itself the first of these that is there.
    dtype : "float32", "bfloat16", "float16" or torch.dtype, optional
        by itself bfloat16 where the hardware multiplies it, else float32; see `choose_dtype`.
    progress : callable (fraction, text), optional
        told how far the work is, 0 to 1; an exception raised by it interrupts a fetch.

    Raises
    ------
    ModelError
        no such model, no network, a damaged file, too little memory: in one sentence.
    """
    progress = progress or embedded.quiet
    with _loading:
        where = choose_device(device)
        number = choose_dtype(dtype, where)
        read: Callable[[], Parts]
        if name is None or name == embedded.EMBEDDED.model:
            number, folder = _embedded(dtype, number, progress)
            name, source, read = embedded.EMBEDDED.model, str(folder), partial(_read_folder, folder, where, number)
        else:
            name = os.fspath(name)
            source, read = _find(name, where, number)
        progress(0.9, f"Loading {name}")
        model, tokenizer = _shared((source, str(where), str(number), *_stamp(source)), name, where, read)
        progress(1.0, f"{name} is ready")
    config: Any = model.config.get_text_config()
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        name=name,
        device=where,
        dtype=number,
        source=source,
        num_params=sum(p.numel() for p in model.parameters()),
        kv_bytes_per_token=_kv_bytes(config) * number.itemsize,
        vocab_size=config.vocab_size,
        max_position=getattr(config, "max_position_embeddings", None),
    )


def _embedded(asked: object, dtype: torch.dtype, progress: Progress) -> tuple[torch.dtype, Path]:
    """Choose the copy that serves: a bfloat16 one for bfloat16, or where it is all there is and nobody asked for more."""
    small_will_do = dtype is torch.bfloat16 or (asked is None and not embedded.model_folder("float32").exists())
    if small_will_do and embedded.trouble("bfloat16") is None:
        return torch.bfloat16, embedded.model_folder("bfloat16")
    return dtype, embedded.fetch("float32", progress=lambda part, text: progress(0.9 * part, text), thorough=False)


def _find(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str, Callable[[], Parts]]:
    """Tell what `name` means: where it comes from, and how to read it."""
    if name in TINY:
        return f"random weights ({name})", lambda: (make_tiny(name, dtype), None)
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path.resolve()), partial(_read_folder, path.resolve(), device, dtype)
    if path.is_file():
        return str(path.resolve()), partial(_read_gguf, path.resolve(), device, dtype)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return name, partial(_read_hub, name, device, dtype)
    if set(name) & {"/", "\\"} or name.endswith(".gguf"):
        msg = f"There is no folder or file {name} here (looked in {Path.cwd()}): check the path; a hub model is named org/name."
        raise ModelError(msg)
    known = [*TINY, embedded.EMBEDDED.model, *(entry.name for entry in Path().iterdir() if entry.is_dir())]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (perhaps you mean {close[0]})" if close else ""
    msg = f"There is no model {name!r} here{hint}: name a folder, a .gguf file, a hub model (org/name) or a tiny-llama."
    raise ModelError(msg)


def _shared(key: tuple[str, ...], name: str, device: torch.device, read: Callable[[], Parts]) -> Parts:
    """Give the model that is loaded already, or read it, every failure in words."""
    model = _models.get(key)
    if model is not None:
        return model, _tokenizers[model]
    try:
        model, tokenizer = read()
        model = model.to(device).eval()  # type: ignore[arg-type]
        arrange(model)
    except ModelError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        msg = f"The memory of {device} ended while {name} was loading: take a smaller model or dtype, or end what else uses it."
        raise ModelError(msg) from error
    except Exception as error:  # transformers raises a dozen kinds; the first line of each says what is wrong
        msg = f"{name} cannot be loaded: {_first_line(error)}"
        raise ModelError(msg) from error
    _tokenizers[model] = tokenizer
    _models[key] = model
    return model, tokenizer


def _read_folder(folder: Path, device: torch.device, dtype: torch.dtype) -> Parts:
    weights = sorted(folder.glob("*.safetensors"))
    for lacks in (["config.json"] if not (folder / "config.json").is_file() else []) + (["*.safetensors"] if not weights else []):
        msg = f"The folder {folder} holds no {lacks}, so it is no model that can be loaded: name one saved by save_pretrained."
        raise ModelError(msg)
    require_memory(sum(map(safetensors_file.count_parameters, weights)) * dtype.itemsize, device, folder.name)
    return _from_pretrained(str(folder), dtype, local_files_only=True), _tokenizer_of(folder)


def _read_gguf(path: Path, device: torch.device, dtype: torch.dtype) -> Parts:
    require_memory(gguf_file.count_parameters(path) * dtype.itemsize, device, path.name)
    with _no_bars():
        return gguf_file.load_gguf(path, dtype)


def _read_hub(name: str, device: torch.device, dtype: torch.dtype) -> Parts:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(name)
        make: Any = AutoModelForCausalLM.from_config
        with torch.device("meta"):  # the model without its numbers
            size = sum(p.numel() for p in make(config).parameters())
        require_memory(size * dtype.itemsize, device, name)
        return _from_pretrained(name, dtype), AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise ModelError(_hub_trouble(name, error)) from error


def _from_pretrained(name: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:  # noqa: ANN401 - transformers' own
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained
    with _no_bars() if options.get("local_files_only") else contextlib.nullcontext():
        model, report = read(name, dtype=dtype, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
        # transformers would go on with random numbers in their place
        msg = f"{name} lacks the weights of {len(missing)} tensors (the first is {missing[0]}): get its files again."
        raise ModelError(msg)
    return model  # type: ignore[no-any-return]


def _tokenizer_of(folder: Path) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    if not any((folder / file).exists() for file in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def _hub_trouble(name: str, error: OSError) -> str:
    """Turn what the hub or the lack of one said into a sentence."""
    kinds = set()
    cause: BaseException | None = error
    while cause is not None:
        kinds.add(type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    if "GatedRepoError" in kinds:
        return f"The hub gives {name} only to people who accepted its licence: do so on its page, then run `hf auth login`."
    if kinds & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError", "ConnectError", "ConnectTimeout"}:
        return (
            f"{name} is no folder here and was not downloaded before, and the model hub cannot be reached "
            "(no network, or HF_HUB_OFFLINE is set): connect, or name a local folder."
        )
    if "RepositoryNotFoundError" in kinds:
        return f"{name} is no folder here, and the hub has no public model of that name: check the spelling (org/name)."
    return f"{name} cannot be loaded from the hub: {_first_line(error)}"


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers' own progress bars off the screen: half a second of local loading needs none."""
    from transformers.utils import logging as typed

    logging: Any = typed
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _kv_bytes(config: Any) -> int:  # noqa: ANN401 - configs have no common type for these
    """Count the numbers that K and V of one token hold over all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * heads * head_dim)


def _stamp(source: str) -> tuple[str, ...]:
    """Tell files that were written anew from those in memory."""
    path = Path(source)
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    return tuple(f"{file.name}:{file.stat().st_mtime_ns}" for file in files)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
