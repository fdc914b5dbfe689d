"""Loading models and the probe that every one must pass before an engine uses it."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_package import write_gguf
from transformers.models.llama import modeling_llama

from kvlab.engine import memory, models
from kvlab.engine.attention import PagedKV, Span, forward, kv_shapes
from kvlab.engine.device import choose_dtype
from kvlab.engine.errors import ModelError
from kvlab.engine.layout import arrange
from kvlab.engine.models import load_model
from kvlab.engine.pool import Pool, bytes_per_token
from kvlab.engine.probe import probe
from kvlab.engine.reader import token_texts
from kvlab.engine.tiny import TINY, make_tiny

REFUSED = ("tiny-bloom", "tiny-falcon")
SUPPORTED = [name for name in TINY if name not in REFUSED]


def tiny(name, dtype="float32"):
    return load_model(name, device="cpu", dtype=dtype)


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama as save_pretrained leaves it."""
    tiny("tiny-llama").model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits(model, ids):
    with torch.inference_mode():
        return model(torch.as_tensor(ids)[None]).logits[0]


def test_wide_layers_lie_column_by_column_and_hold_the_same_numbers():
    model = make_tiny("tiny-llama", torch.float32)
    before = logits(model, range(9))
    arrange(model)
    up = model.model.layers[0].mlp.up_proj.weight
    assert not up.is_contiguous()
    assert up.t().is_contiguous()
    assert model.model.embed_tokens.weight.is_contiguous()
    torch.testing.assert_close(logits(model, range(9)), before)


def test_a_remembered_model_keeps_its_tokenizer(folder, embedded):
    embedded.tokenizer.save_pretrained(folder)
    loaded = load_model(folder, device="cpu", dtype="float32")
    assert loaded.tokenizer is not None
    model, loaded = loaded.model, None
    gc.collect()
    again = load_model(folder, device="cpu", dtype="float32")
    assert again.model is model
    assert again.tokenizer is not None


# ------------------------------------------------------------------ the embedded model
def test_embedded_model_is_the_one_that_was_promised(embedded):
    assert embedded.name == "SmolLM2-135M-Instruct"
    assert (embedded.num_params, embedded.vocab_size, embedded.max_position) == (134_515_008, 49_152, 8_192)
    assert embedded.kv_bytes_per_token == 46_080 * embedded.dtype.itemsize // 4


def test_embedded_model_answers_through_its_chat_template(embedded):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = embedded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = embedded.model.generate(**ids.to(embedded.device), max_new_tokens=12, do_sample=False)
    answer = embedded.tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_embedded_model_passes_the_probe(embedded):
    probe(embedded)


def test_second_load_shares_the_weights(embedded):
    again = load_model()
    assert again.model is embedded.model
    assert again.tokenizer is embedded.tokenizer


# ------------------------------------------------------------------ what is loaded
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_are_the_same_every_time_and_leave_the_random_state_alone(name):
    state = torch.random.get_rng_state()
    first = {key: value.clone() for key, value in tiny(name).model.state_dict().items()}
    models._models.clear()
    second = tiny(name).model
    assert not second.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in first.items())


def test_a_tiny_model_in_bfloat16_is_the_float32_one_rounded():
    whole, rounded = tiny("tiny-llama").model, tiny("tiny-llama", "bfloat16").model
    assert rounded.dtype is torch.bfloat16
    assert torch.equal(whole.lm_head.weight.bfloat16(), rounded.lm_head.weight)
    frequencies = [model.model.rotary_emb.inv_freq for model in (whole, rounded)]
    assert torch.equal(*frequencies), "positions are not rounded"


@pytest.mark.parametrize("name", SUPPORTED)
def test_bytes_of_a_token_are_those_that_the_model_writes(name):
    loaded = tiny(name)
    assert loaded.kv_bytes_per_token == bytes_per_token(kv_shapes(loaded.model))


def test_a_folder_gives_the_logits_of_what_was_saved(folder):
    loaded = load_model(folder, device="cpu", dtype="float32")
    ids = list(range(50))
    assert torch.equal(logits(loaded.model, ids), logits(tiny("tiny-llama").model, ids))
    assert loaded.tokenizer is None
    assert loaded.source == str(folder)


def test_a_gguf_file_is_unpacked(tmp_path):
    num_params = write_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(tmp_path / "tiny.gguf", device="cpu", dtype="float32")
    assert loaded.num_params == num_params
    assert loaded.tokenizer.decode(loaded.tokenizer("hi there")["input_ids"]) == "hi there"
    probe(loaded)


def test_weights_are_shared_as_long_as_somebody_uses_them(folder):
    first = load_model(folder, device="cpu", dtype="float32")
    assert load_model(str(folder), device="cpu", dtype=torch.float32).model is first.model
    assert load_model(folder, device="cpu", dtype="bfloat16").model is not first.model
    assert tiny("tiny-llama").model is not tiny("tiny-qwen2").model
    del first
    gc.collect()
    assert not any(key[0] == str(folder) for key in models._models)


def test_a_folder_that_was_written_anew_is_read_anew(folder):
    first = load_model(folder, device="cpu", dtype="float32")
    tiny("tiny-qwen3").model.save_pretrained(folder)
    assert load_model(folder, device="cpu", dtype="float32").model.config.model_type == "qwen3"
    assert first.model.config.model_type == "llama"


def test_two_threads_load_one_copy(folder):
    found = []
    threads = [threading.Thread(target=lambda: found.append(load_model(folder, device="cpu").model)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(model) for model in found}) == 1


def test_a_loaded_model_shows_itself(folder):
    loaded = tiny("tiny-llama")
    assert repr(loaded) == "tiny-llama: 0.2 million parameters in float32 on cpu, 768 bytes of K and V a token"
    assert loaded._repr_html_().startswith("<b>tiny-llama</b>: 0.2 million")
    named = load_model(folder.rename(folder.with_name("<i>")), device="cpu")
    assert "<i>" not in named._repr_html_()


def test_dtype_by_itself_follows_the_hardware(monkeypatch):
    flags = "flags\t\t: fpu avx512f {}\n"
    for extra, dtype in {"": torch.float32, "avx512_bf16": torch.bfloat16, "amx_bf16 amx_tile": torch.bfloat16}.items():
        monkeypatch.setattr(Path, "read_text", lambda *_, extra=extra, **__: flags.format(extra))
        assert choose_dtype(None, torch.device("cpu")) is dtype


# ------------------------------------------------------------------ what cannot be loaded
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny-lama", r"no model 'tiny-lama' here \(perhaps you mean tiny-llama\)"),
        ("some-model", r"no model 'some-model' here: name a folder, a \.gguf file, a hub model \(org/name\)"),
        (
            "org/no-such-model",
            r"org/no-such-model is no folder here .* hub cannot be reached .*: connect, or name a local folder",
        ),
        ("./here", r"no folder or file \./here here .*: check the path"),
        ("/no/such/folder", "no folder or file /no/such/folder here"),
        ("models/x.gguf", r"no folder or file models/x\.gguf here"),
    ],
)
def test_unknown_models(name, words):
    with pytest.raises(ModelError, match=words):
        load_model(name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "tpu"}, "no device 'tpu' for kvlab: name cuda, mps or cpu"),
        ({"device": "cuda:99"}, "cuda:99 is not here"),
        ({"dtype": "int8"}, "cannot be run in 'int8': name float32, bfloat16 or float16"),
        ({"dtype": torch.int64}, "cannot be run in torch.int64"),
    ],
)
def test_devices_and_dtypes_that_are_not_there(options, words):
    with pytest.raises(ModelError, match=words):
        load_model("tiny-llama", **options)


def truncate(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)


def cut_header(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(20)


def spoil_header(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 100)


def drop_tensor(folder):
    """Rename a tensor, as a file of another model would have it."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"model.layers.1.mlp.up_proj", b"model.layers.9.mlp.up_proj"))


def other_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))


def spoil_config(folder):
    (folder / "config.json").write_text("{")


def strange_config(folder):
    (folder / "config.json").write_text('{"model_type": "no-such-kind"}')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, r"model\.safetensors is truncated or altered \(100,000 bytes instead of [\d,]+\): get it again"),
        (cut_header, r"model\.safetensors is truncated or altered \(its header cannot be read\)"),
        (spoil_header, r"model\.safetensors is truncated or altered \(its header cannot be read\)"),
        (drop_tensor, r"lacks the weights of 1 tensors \(the first is model\.layers\.1\.mlp\.up_proj\.weight\)"),
        (other_shape, "cannot be loaded"),
        (spoil_config, "cannot be loaded"),
        (strange_config, "cannot be loaded.*no-such-kind"),
        (lambda folder: (folder / "config.json").unlink(), r"holds no config\.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"holds no \*\.safetensors"),
    ],
)
def test_damaged_folders(folder, damage, words):
    damage(folder)
    with pytest.raises(ModelError, match=words) as caught:
        load_model(folder, device="cpu")
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "truncated"), (3, "truncated"), (1000, "its header cannot be read"), (20_000, "it ends before its last tensor")],
)
def test_a_truncated_gguf_file(tmp_path, size, words):
    write_gguf(tmp_path / "tiny.gguf")
    with (tmp_path / "tiny.gguf").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(ModelError, match=words):
        load_model(tmp_path / "tiny.gguf", device="cpu")


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "notes.txt").write_text("What I wanted to say")
    with pytest.raises(ModelError, match="is no GGUF file"):
        load_model(tmp_path / "notes.txt", device="cpu")


def test_a_failed_load_does_not_spoil_the_next(folder):
    whole = (folder / "model.safetensors").read_bytes()
    truncate(folder)
    with pytest.raises(ModelError):
        load_model(folder, device="cpu")
    (folder / "model.safetensors").write_bytes(whole)
    probe(load_model(folder, device="cpu", dtype="float32"))


# ------------------------------------------------------------------ memory
def test_what_cannot_fit_is_refused_before_it_is_loaded(folder):
    """A file that claims 10 TB of weights and, being full of holes, takes no room."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2_500_000_000_000], "data_offsets": [0, 10_000_000_000_000]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + 10_000_000_000_000)
        except OSError:
            pytest.skip("this file system has no files of 10 TB")
    with pytest.raises(
        ModelError, match=r"model needs 10,000\.0 GB and only [\d.,]+ [GM]B of memory are free on cpu: take a smaller"
    ):
        load_model(folder, device="cpu", dtype="float32")


def test_free_memory_counts_what_a_container_allows(tmp_path):
    """Both versions of cgroups, as /sys/fs/cgroup and /proc/self/cgroup show them; the tightest of all ancestors binds."""
    new, old = tmp_path / "new", tmp_path / "old"
    for folder, limit, usage in ((new / "a", "max", 5_000), (new / "a/b", "2000000", 1_500_000)):
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text("anon 10\ninactive_file 300000\n")
    (old / "memory/c").mkdir(parents=True)
    (old / "memory/c/memory.limit_in_bytes").write_text("1000000\n")
    (old / "memory/c/memory.usage_in_bytes").write_text("900000\n")
    (old / "memory/c/memory.stat").write_text("total_inactive_file 50000\n")
    (tmp_path / "self").write_text("9:cpu,cpuacct:/x\n4:memory:/c\n0::/a/b\n")
    assert list(memory._cgroup_room(new, tmp_path / "self")) == [800_000]
    assert list(memory._cgroup_room(old, tmp_path / "self")) == [150_000]
    assert 0 < memory.free_memory("cpu") < 2**50


@pytest.mark.parametrize(("size", "words"), [(0, "0 bytes"), (999, "999 bytes"), (46_080, "46 kB"), (999_600_000, "1.0 GB")])
def test_bytes_in_words(size, words):
    assert memory.in_words(size) == words


# ------------------------------------------------------------------ the probe
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_probe_passes(name, dtype):
    loaded = tiny(name, dtype)
    before = loaded.model.config._attn_implementation
    probe(loaded)
    assert loaded.model.config._attn_implementation == before, "a model keeps its own attention"


def test_probe_refuses_bloom_which_ignores_the_interface():
    with pytest.raises(ModelError, match=r"tiny-bloom \(BloomForCausalLM\) is refused: .* called kvlab's attention 0 times"):
        probe(tiny("tiny-bloom"))


def test_probe_refuses_falcon_which_raises():
    with pytest.raises(ModelError, match=r"tiny-falcon \(FalconForCausalLM\) is refused: its attention cannot be replaced"):
        probe(tiny("tiny-falcon"))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_still_works_in_transformers(name):
    loaded = tiny(name)
    before = logits(loaded.model, range(20))
    with pytest.raises(ModelError):
        probe(loaded)
    assert torch.equal(logits(loaded.model, range(20)), before)


def leak(kv, monkeypatch):
    """One sequence sees the other's tokens."""
    plan = kv._plan

    def wrong(self, window, query):
        self.spans = [Span(np.concatenate([self.spans[0].slots[:1], s.slots[1:]]), s.new) for s in self.spans]
        return plan(self, window, query)

    monkeypatch.setattr(kv, "_plan", wrong)


def forget(kv, monkeypatch):
    """V is not written."""
    put = kv._put
    monkeypatch.setattr(kv, "_put", lambda self, pool, new: put(self, pool, new * 0))


def scale(kv, monkeypatch):
    """The scores are scaled by 1 instead of 1/sqrt(head_dim)."""
    attend = kv.attend

    def wrong(self, *arguments):
        return attend(self, *arguments[:-1], arguments[-1]._replace(scale=1.0))

    monkeypatch.setattr(kv, "attend", wrong)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [leak, forget, scale])
def test_probe_notices_a_wrong_attention(monkeypatch, fault, dtype):
    loaded = tiny("tiny-llama", dtype)
    probe(loaded)
    fault(PagedKV, monkeypatch)
    with pytest.raises(ModelError, match=r"are [\d.]+ away from eager attention's, and rounding explains [\d.e-]+"):
        probe(loaded)


def test_probe_notices_numbers_that_are_none(folder):
    loaded = load_model(folder, device="cpu", dtype="float32")
    with torch.no_grad():
        loaded.model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match="are nan away"):
        probe(loaded)


def test_probe_notices_a_layer_that_is_skipped(monkeypatch):
    loaded = tiny("tiny-llama")
    forward_of = modeling_llama.LlamaAttention.forward

    def lazy(self, hidden_states, *arguments, **options):
        return (hidden_states, None) if self.layer_idx == 1 else forward_of(self, hidden_states, *arguments, **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", lazy)
    with pytest.raises(ModelError, match="its layer 1 called kvlab's attention 0 times"):
        probe(loaded)


@pytest.mark.parametrize("name", SUPPORTED)
def test_long_packed_prompts_equal_transformers_own(name):
    """Longer than the sliding windows of tiny-gemma2 and tiny-gemma3, which the probe's sequences are not."""
    loaded = tiny(name)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, loaded.vocab_size, length) for length in (90, 50)]
    slots = rng.permutation(160)
    spans = [Span(slots[:90], 90), Span(slots[90:140], 50)]
    pool = Pool(kv_shapes(loaded.model), 160, loaded.device, poison=True)
    ours = forward(loaded.model, np.concatenate(prompts), PagedKV(pool, spans), range(140))
    own = torch.cat([logits(loaded.model, ids) for ids in prompts])
    assert (ours - own).abs().max() <= 1e-4 * own.abs().max()


# ------------------------------------------------------------------ the room


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello <b>$x$</b><br>",
        "日本語と \U0001f469‍\U0001f469‍\U0001f467, naïve\n<|im_end|>  end",
        "x\N{REPLACEMENT CHARACTER}y \N{REPLACEMENT CHARACTER}",
    ],
)
def test_the_texts_of_tokens_make_up_the_text(embedded, text):
    ids = embedded.tokenizer.encode(text)
    texts = token_texts(embedded.tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_a_character_that_never_ends_is_shown_as_broken(embedded):
    ids = embedded.tokenizer.encode("\U0001f469")[:-1] * 7 + embedded.tokenizer.encode("fine")
    texts = token_texts(embedded.tokenizer, ids)
    assert sum(map(bool, texts)) > 3, "what is broken is not held back to the end"
    assert "".join(texts) == embedded.tokenizer.decode(ids)
