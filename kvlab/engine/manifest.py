"""A list of a folder's files with their sizes and sha256, written when they are made, by which damage is noticed later."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MANIFEST = "kvlab.json"


def seal(folder: Path, about: Mapping[str, str]) -> None:
    """Write the list of files, with what they are `about`; let all who may enter the folder above read them."""
    files = {}
    for file in sorted(folder.iterdir()):
        file.chmod(0o644)  # safetensors makes files that only their owner can read
        found = file.stat()
        files[file.name] = (found.st_size, int(found.st_mtime), sha256(file))
    (folder / MANIFEST).write_text(json.dumps({**about, "files": files}, indent=1) + "\n", encoding="utf-8")
    folder.chmod(0o755)


def fault(folder: Path, about: Mapping[str, str], *, thorough: bool = False) -> str | None:
    """Say in words why `folder` does not hold what was sealed in it; None if it does.

    Sizes are always compared. The sha256 of a file is compared if `thorough`, or if the file was touched since.
    """
    try:
        manifest: Any = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if any(manifest[key] != value for key, value in about.items()):
            return "it holds another version"
        for name, (size, modified, digest) in manifest["files"].items():
            file = folder / name
            try:
                found = file.stat()
            except FileNotFoundError:
                return f"{name} is missing"
            if found.st_size != size:
                return f"{name} has {found.st_size:,} bytes instead of {size:,}"
            if (thorough or int(found.st_mtime) != modified) and sha256(file) != digest:
                return f"{name} was altered"
    except (FileNotFoundError, NotADirectoryError):
        return "it is not there"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its list of files ({MANIFEST}) is damaged"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return None


def sha256(file: Path) -> str:
    """Return the digest of a file in hexadecimal."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
