"""The house: who may import whom, what each room may import from outside, and that what is said about it is so.

The tables stand in ARCHITECTURE.md, for people; these tests read them there and hold the code to them.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = sorted((ROOT / "kvlab").rglob("*.py"))


def table(heading):
    """The rows of the first markdown table below a heading of ARCHITECTURE.md, each a list of cells."""
    section = ARCHITECTURE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 2, f"ARCHITECTURE.md has no table below {heading!r}"
    return rows[2:]


def names(cell):
    """What stands in backquotes in a cell."""
    return set(re.findall(r"`([^`]+)`", cell))


def room(module):
    """`cache` for kvlab.cache.state, `prompts` for kvlab.prompts, `kvlab` for the package's own __init__."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "kvlab"


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Every (module, line) that a file imports, anywhere in it; `from kvlab.cache import events` counts as kvlab.cache.events."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide which room is meant"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = (ROOT / f"{inner.replace('.', '/')}.py").exists()
                yield (inner if is_module or node.module == "kvlab" else node.module), node.lineno


def from_outside(path):
    """Every (top-level name, line) that a file imports and that is neither ours nor the standard library's."""
    for module, line in imports(path):
        top = module.split(".")[0]
        if top != "kvlab" and top not in sys.stdlib_module_names:
            yield top, line


RULES = {next(iter(names(row[0]))): row[1:] for row in table("Who may import whom")}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_only_what_its_room_may(path):
    module = module_name(path)
    if module == "kvlab":
        return  # it loads names on first use; the test below holds it to that
    assert room(module) in RULES, f"{module} lies in a room that ARCHITECTURE.md does not know"
    ours, theirs = RULES[room(module)]
    allowed = names(ours)
    bad = [
        f"line {line}: {found}"
        for found, line in imports(path)
        if found.startswith("kvlab.")
        and room(found) != room(module)
        and "anything" not in ours
        and not any(found == f"kvlab.{name}" or found.startswith(f"kvlab.{name}.") for name in allowed)
    ]
    bad += [
        f"line {line}: {top}"
        for top, line in from_outside(path)
        if top not in names(theirs) and f"{module.removeprefix('kvlab.')}:{top}" not in names(theirs)
    ]
    assert not bad, f"{module} imports what `{room(module)}` may not import:\n" + "\n".join(bad)


def test_the_caches_know_no_clock_and_no_chance():
    """Their answers depend on nothing but the calls: no time, no unseeded random numbers, no environment, no files.

    One exception: as in vLLM, xxhash keys without a seed begin at random (os.urandom).
    """
    banned = {"time", "datetime", "random", "secrets", "uuid", "os", "pathlib", "io", "subprocess", "threading", "socket"}
    found = [
        f"{path.name}:{line}: {module}"
        for path in MODULES
        if room(module_name(path)) == "cache"
        for module, line in imports(path)
        if module.split(".")[0] in banned and (path.name, module) != ("hashing.py", "os")
    ]
    assert not found


def run(code, *options):
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_kvlab_loads_nothing_heavy():
    loaded = set(run("import sys, kvlab; print(*{name.split('.')[0] for name in sys.modules})").split())
    assert "kvlab" in loaded
    assert not loaded & {"torch", "transformers", "plotly", "ipywidgets", "anywidget", "traitlets", "numpy", "typer"}


@pytest.mark.parametrize("name", ["BlockCache", "RadixCache", "PlainCache"])
def test_a_cache_loads_numpy_and_nothing_heavier(name):
    loaded = set(run(f"import sys, kvlab; kvlab.{name}; print(*{{name.split('.')[0] for name in sys.modules}})").split())
    assert "numpy" in loaded
    assert not loaded & {"torch", "transformers", "plotly", "ipywidgets", "xxhash", "cbor2"}


def closure(*roots):
    """The distributions that `roots` need, and what those need, without extras."""
    found, todo = set(), list(roots)
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        found.add(name)
        needs = map(Requirement, requires)
        todo += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A folder for sys.path with torch, transformers, numpy and what they need, and nothing else that is installed here."""
    folder = tmp_path_factory.mktemp("bare")
    for name in closure("torch", "transformers", "numpy"):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in {"..", "__pycache__"}}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return folder


BARE = """
import sys
sys.path[:0] = {paths!r}
import importlib, pkgutil
for absent in ("plotly", "ipywidgets", "anywidget", "platformdirs", "psutil", "gguf", "accelerate", "xxhash", "cbor2"):
    assert importlib.util.find_spec(absent) is None, absent
for room in ("cache", "schedule", "engine"):
    package = importlib.import_module(f"kvlab.{{room}}")
    for module in pkgutil.walk_packages(package.__path__, f"kvlab.{{room}}."):
        if module.name != "kvlab.engine.kernels":  # Triton comes with CUDA builds of torch
            importlib.import_module(module.name)
import kvlab
for cache in ("vllm", "sglang"):
    engine = kvlab.Engine(model="tiny-llama", cache=cache, num_tokens=256, device="cpu", dtype="float32")
    first, second = (engine.generate([list(range(100))], max_new_tokens=4, ignore_eos=True)[0] for _ in range(2))
    assert first.output_ids == second.output_ids
    print(cache, first.cached_tokens, second.cached_tokens)
"""


def test_the_engine_runs_with_torch_transformers_and_numpy_alone(bare):
    said = run(BARE.format(paths=[str(bare), str(ROOT)]), "-I", "-S")
    assert said.splitlines() == ["vllm 0 96", "sglang 0 99"]


def declared(key=None):
    lines = PROJECT["dependencies"] if key is None else PROJECT["optional-dependencies"][key]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_every_import_from_outside_is_declared():
    homes = importlib.metadata.packages_distributions()
    known = declared() | declared("hashes")
    comes_with_torch = {"triton"}
    missing = {
        f"{path.relative_to(ROOT)}:{line}: {top}"
        for path in MODULES
        for top, line in from_outside(path)
        if top not in comes_with_torch and not {canonicalize_name(home) for home in homes.get(top, [])} & known
    }
    assert not missing, "imported, but not among pyproject.toml's dependencies"


def test_every_dependency_has_its_reason():
    reasons = {canonicalize_name(name): row[1] for row in table("Dependencies") for name in names(row[0])}
    everything = declared().union(*(declared(extra) for extra in PROJECT["optional-dependencies"])) - {"kvlab"}
    everything |= {canonicalize_name(Requirement("hatchling").name)}
    assert set(reasons) == everything
    assert all(reasons.values())


def test_constraints_are_exact_and_complete():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert not [version for version in pins.values() if not re.fullmatch(r"[0-9][0-9a-z.]*", version)], "no +cpu, no paths"
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    assert pins["torch"] == "2.13.0"
    assert pins["transformers"] == "5.24.0"
    ours = [Requirement(line) for key in PROJECT["optional-dependencies"] for line in PROJECT["optional-dependencies"][key]]
    ours = [need for need in ours + [Requirement(line) for line in PROJECT["dependencies"]] if need.name != "kvlab"]
    outside = [str(need) for need in ours if pins.get(canonicalize_name(need.name)) not in need.specifier]
    assert not outside, "not pinned in constraints.txt, or to a version that pyproject.toml does not allow"
    missing = closure(*(need.name for need in ours)) - set(pins)
    missing = {name for name in missing if not name.startswith(("nvidia-", "cuda-", "triton"))}  # see its head
    assert not missing, "needed by something in constraints.txt, and not pinned there"


def test_every_rule_that_the_code_names_is_there():
    cited = re.compile(r"docs/(vllm|sglang)\.md ((?:\d+(?:-\d+)?(?:, | and )?)+)")
    rules = {
        engine: set(re.findall(r"^(\d+)\. ", (ROOT / f"docs/{engine}.md").read_text(encoding="utf-8"), re.MULTILINE))
        for engine in ("vllm", "sglang")
    }
    found = 0
    for path in MODULES:
        for engine, numbers in cited.findall(path.read_text(encoding="utf-8")):
            found += 1
            missing = set(re.findall(r"\d+", numbers)) - rules[engine]
            assert not missing, f"{path} names rules that docs/{engine}.md lacks"
    assert found > 10


@pytest.mark.parametrize("words", ["kvlab/views/strings.py", "kvlab/widgets/words.py"])
def test_every_word_is_said_somewhere(words):
    code = "".join(path.read_text(encoding="utf-8") for path in MODULES)
    defined = re.findall(r"^([A-Z][A-Z_]+)(?:, [A-Z_, ]+)? = ", (ROOT / words).read_text(encoding="utf-8"), re.MULTILINE)
    assert len(defined) > 20
    assert not [name for name in defined if len(re.findall(rf"\b{name}\b", code)) < 2], "words that nobody uses"


def test_every_module_is_described():
    described = names(ARCHITECTURE)
    missing = [
        str(path.relative_to(ROOT / "kvlab"))
        for path in MODULES
        if path.name != "__init__.py" and not {path.name, str(path.relative_to(ROOT / "kvlab"))} & described
    ]
    assert not missing, "ARCHITECTURE.md has no line on them"
    gone = {name for name in described if re.fullmatch(r"[a-z_]+\.py", name)} - {path.name for path in MODULES}
    assert not gone, "ARCHITECTURE.md describes files that are not there"
