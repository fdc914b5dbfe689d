"""From an engine's options to its cache and its scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlab.cache.block_cache import BlockCache
from kvlab.cache.plain_cache import PlainCache
from kvlab.cache.radix_cache import RadixCache
from kvlab.engine.request import EngineError
from kvlab.schedule.sglang import SglangScheduler
from kvlab.schedule.vllm import VllmScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlab.cache.contract import Cache
    from kvlab.schedule.scheduler import Scheduler

UNITS = {"vllm": ("block_size", 16), "sglang": ("page_size", 1), "none": ("block_size", 16)}  # keyword, default


def check_options(
    cache: str | Callable[[int], Cache], num_tokens: int | None, max_batch_tokens: int, options: dict[str, Any]
) -> int:
    """Return the unit of the cache; refuse in words what cannot be, before a model is loaded for it.

    Raises
    ------
    EngineError
    """
    for name, value in (("num_tokens", num_tokens), ("max_batch_tokens", max_batch_tokens)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            msg = f"{name} is {value!r}: give a whole number of tokens, at least 1."
            raise EngineError(msg)
    if callable(cache):
        if options:
            msg = f"{', '.join(options)}: a cache made by a factory takes its options there, not from the engine."
            raise EngineError(msg)
        return 1
    if cache not in UNITS:
        msg = f"there is no cache {cache!r}: choose 'vllm', 'sglang' or 'none', or give a factory that takes num_tokens."
        raise EngineError(msg)
    name, default = UNITS[cache]
    unit = options.get(name, default)
    if not isinstance(unit, int) or isinstance(unit, bool) or unit < 1:
        msg = f"{name} is {unit!r}: give a whole number of tokens, at least 1."
        raise EngineError(msg)
    if num_tokens is not None and num_tokens % unit:
        near = max(num_tokens // unit, 1) * unit
        msg = f"{name} {unit} does not divide a pool of {num_tokens:,} tokens: choose another {name}, or num_tokens={near}."
        raise EngineError(msg)
    if max_batch_tokens < unit:
        msg = f"max_batch_tokens is {max_batch_tokens} and a unit has {unit} tokens ({name}): a step must hold at least one."
        raise EngineError(msg)
    return int(unit)


def build_cache(cache: str | Callable[[int], Cache], num_tokens: int, options: dict[str, Any]) -> Cache:
    """Make the cache; a pool of a fixed size is what an engine needs.

    Raises
    ------
    EngineError
        for unknown options, values that the cache refuses, and caches without end.
    """
    try:
        if callable(cache):
            built = cache(num_tokens)
        elif cache == "vllm":
            built = BlockCache(num_tokens // options.get("block_size", UNITS["vllm"][1]) + 1, **options)
        else:
            built = (RadixCache if cache == "sglang" else PlainCache)(num_tokens, **options)
    except (TypeError, ValueError) as error:
        msg = f"the cache cannot be made: {error}"
        raise EngineError(msg) from None
    if built.num_tokens is None:
        msg = "the factory's cache is unlimited: a live model needs a pool of fixed size; use the num_tokens that it is given."
        raise EngineError(msg)
    return built


def build_scheduler(cache: Cache, max_batch_tokens: int) -> Scheduler:
    """Make the scheduler that belongs to a cache; paging without reuse is scheduled as vLLM does.

    Raises
    ------
    EngineError
        for a step too small for the cache.
    """
    try:
        if cache.policy == "sglang":
            return SglangScheduler(cache, max_batch_tokens, overlap=getattr(cache, "overlap", True))
        return VllmScheduler(cache, max_batch_tokens, watermark=getattr(cache, "watermark", 0.0))
    except ValueError as error:
        raise EngineError(str(error)) from None
