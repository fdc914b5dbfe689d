"""README and ARCHITECTURE: links lead somewhere, commands exist, the example runs and prints what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_links_lead_somewhere(name):
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text(encoding="utf-8"))
    broken = [target for target in targets if not target.startswith("https://") and not (ROOT / target).exists()]
    assert not broken


def test_every_make_target_that_the_readme_names_exists():
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"(?:`|^ {4})make ([a-z]+)", README, re.MULTILINE))
    assert {"lab", "test"} <= named
    assert not named - set(re.findall(r"^  make ([a-z]+)", listed, re.MULTILINE))


def test_every_command_that_the_readme_names_exists():
    listed = subprocess.run(
        [sys.executable, "-m", "kvlab", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    named = set(re.findall(r"^ {4}kvlab ([a-z]+)", README, re.MULTILINE))
    assert {"fetch", "demo"} <= named
    assert not [command for command in named if not re.search(rf"\b{command}\b", listed)]


@pytest.mark.usefixtures("embedded")  # so that a first download does not count against this test
def test_the_example_runs_and_prints_what_it_says():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first == re.search(r"# (\d+ of \d+):", code)[1]
    assert last == re.search(r"# (\d+): the last token", code)[1]
