"""Tiny models with random weights, made in memory: every architecture that kvlab knows, in milliseconds, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCAB = 512
SEED = 20240607
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
_GROUPED = _SIZES | {"num_key_value_heads": 2, "head_dim": 16}

# name: model_type and sizes; Bloom and Falcon are there to be refused by the probe
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-llama": ("llama", _GROUPED),
    "tiny-mistral": ("mistral", _GROUPED | {"sliding_window": None}),
    "tiny-qwen2": ("qwen2", _SIZES | {"num_key_value_heads": 2}),
    "tiny-qwen3": ("qwen3", _GROUPED),
    "tiny-gemma": ("gemma", _GROUPED),
    "tiny-gemma2": ("gemma2", _GROUPED | {"sliding_window": 32}),
    "tiny-gemma3": ("gemma3_text", _GROUPED | {"sliding_window": 32, "sliding_window_pattern": 2}),
    "tiny-gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048}),
    "tiny-phi": ("phi", _SIZES),
    "tiny-neox": ("gpt_neox", _SIZES),
    "tiny-bloom": ("bloom", {"hidden_size": 64, "n_layer": 3, "n_head": 4}),
    "tiny-falcon": ("falcon", {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}),
}


def make_tiny(name: str, dtype: torch.dtype) -> Any:  # noqa: ANN401 - one of transformers' many classes
    """Make the tiny model `name`; the same weights every time, and the caller's random state as it was."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = TINY[name]
    make: Any = AutoModelForCausalLM.from_config
    # Weights ten times as large as usual: attention is then far from uniform, so that a wrong one shows in the logits.
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **sizes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = make(config, dtype=torch.float32)
    if dtype is not torch.float32:
        # not model.to(dtype), which would also round the rotary frequencies, as loading a checkpoint does not
        rounded = make(config, dtype=dtype)
        rounded.load_state_dict(model.state_dict())
        model = rounded
    return model.eval()
