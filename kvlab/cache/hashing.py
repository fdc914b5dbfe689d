"""Keys: vLLM's digests of hash blocks and SGLang's page hashes, bit for bit (docs/vllm.md 1-5, docs/sglang.md 25).

xxhash and cbor2 are imported only when one of their digests is asked for.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from typing import TYPE_CHECKING, Any

from kvlab.cache.contract import CacheError, Space

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

HASHES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
NONE_SEED = "vllm-none-hash"
SALT_SEED = b"sglang-cache-salt-v1\0"


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor() -> Callable[[Any], bytes]:
    import cbor2

    return lambda value: cbor2.dumps(value, canonical=True)


def digest_function(name: str) -> Callable[[object], bytes]:
    """Return vLLM's hash function called `name`: any picklable value -> digest.

    Raises
    ------
    CacheError
        for a name that vLLM does not know, and where the package that it needs is not installed.
    """
    if name not in HASHES:
        msg = f"hash {name!r} is not one of vLLM's: choose one of {', '.join(HASHES)}."
        raise CacheError(msg)
    try:
        encode = _cbor() if name.endswith("_cbor") else _pickled
        if name.startswith("sha256"):
            return lambda value: hashlib.sha256(encode(value)).digest()
        import xxhash
    except ImportError as error:
        msg = f"hash {name!r} needs the package {error.name}: install it, or choose sha256, which needs none."
        raise CacheError(msg) from None
    return lambda value: xxhash.xxh3_128_digest(encode(value))


def none_hash(name: str, seed: object = None) -> bytes:
    """Return the parent of first blocks: ``H(seed)``; without a seed fixed for sha256, random for xxhash (vllm.md 3)."""
    if seed is None:
        if name.startswith("xxhash"):
            return os.urandom(32)
        seed = NONE_SEED
    if not isinstance(seed, str):
        msg = f"hash_seed is {seed!r}: give it as text, as PYTHONHASHSEED is."
        raise CacheError(msg)
    return digest_function(name)(seed)


def extra_keys(space: Space, start: int, stop: int) -> tuple[tuple[Any, ...], ...] | None:
    """Return what enters the key of the block of tokens ``[start, stop)`` beside parent and tokens (vllm.md 2)."""
    keys: list[tuple[Any, ...]] = []
    if space.lora is not None:
        keys.append(("lora", *space.lora))
    keys.extend(("mm", name, at - start) for name, at, length in space.items if at < stop and at + length > start)
    if space.salt and start == 0:
        keys.append(("cache_salt", space.salt))
    if space.embeds is not None:  # beyond the prompt, where answers stand, it is the digest of nothing
        keys.append(("prompt_embeds", hashlib.sha256(b"".join(space.embeds[start:stop])).digest()))
    return tuple(keys) or None


def event_hash(digest: bytes) -> int:
    """Return how vLLM's KV events name a block: the low 64 bits of its digest (vllm.md 5)."""
    return int.from_bytes(digest[-8:], "big")


def page_digests(tokens: np.ndarray, page_size: int, parent: bytes) -> list[bytes]:
    """Return SGLang's chained digests of whole pages of `tokens` (int32), after a page with digest `parent`."""
    out = []
    raw, width = tokens.astype("<u4").tobytes(), 4 * page_size
    for at in range(0, len(raw), width):
        parent = hashlib.sha256(parent + raw[at : at + width]).digest()
        out.append(parent)
    return out


def first_parent(salt: str | None) -> bytes:
    """Return what SGLang's chain of page digests starts from."""
    return hashlib.sha256(SALT_SEED + salt.encode()).digest() if salt else b""


def page_hash(digest: bytes) -> int:
    """Return how SGLang's KV events name a page: the first 8 bytes of its digest, signed."""
    return int.from_bytes(digest[:8], "big", signed=True)
