from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import parsed

ROOT = parsed.ROOT / "penstock"
BELOW = {
    "core": set[str](),
    "ops": {"core", "native"},
    "native": set(),
    "processes": {"core", "native"},
    "actors": {"core", "processes"},
    "replay": {"core", "native", "ops", "processes", "actors"},
    "agents": {"core", "ops", "native"},
    "learn": {"core", "ops", "native", "agents", "replay"},
    "algos": {"core", "ops", "native", "agents", "learn", "replay"},
    "envs": {"core"},
    "tensor_envs": {"core", "envs"},
    "datasets": {"core", "envs"},
    "workers": {"core", "processes", "envs"},
    "samplers": {"core", "ops", "agents", "processes", "actors", "envs", "tensor_envs", "datasets", "workers"},
    "run": {
        *("core", "native", "ops", "processes", "actors", "replay", "agents", "learn", "algos"),
        *("envs", "tensor_envs", "datasets", "workers", "samplers"),
    },
}
BELOW["testing"] = {*BELOW["run"], "run"}
BELOW["studies"] = {*BELOW["run"], "run"}
BELOW["view"] = {*BELOW["run"], "run"}
BELOW["cli"] = {*BELOW["studies"], "studies", "view"}
ALSO = {
    "learn": {
        "penstock.samplers.sampler",
        *(f"penstock.envs.{name}" for name in ("check", "make", "seats", "agent_observations")),
    },
    "algos": {
        "penstock.samplers.sampler",
        "penstock.datasets.episode",
        *(f"penstock.envs.{name}" for name in ("check", "make", "seats")),
    },
}
"""Single modules of other layers: the Protocols Sampler and EpisodeSource, of which learners are given one and never make
any; and environments' settings, in which `Policies.seat` says who plays whom."""
ENTRY = {"__init__.py": {"core"}, "__main__.py": {"cli"}}
"""Modules of the package itself. What `__init__` imports under TYPE_CHECKING is never run; its lazy table is text."""
CORE_MAY = {"numpy", "optree"}
PYTHON = [sys.executable, "-c"]
FILES = parsed.PACKAGE


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Every import statement of a file wherever it stands, as (line, dotted module), but for those of TYPE_CHECKING."""
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        if path.name == "__init__.py" and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is relative; write the whole path"
            whole = node.module == "penstock"  # `from penstock import ops` imports penstock.ops
            found.extend((node.lineno, f"penstock.{a.name}") for a in node.names if whole)
            found.append((node.lineno, node.module or ""))
        if isinstance(node, ast.Call) and parsed.dotted(node.func).endswith("import_module"):
            text = ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ""
            found.append((node.lineno, text))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parsed.tree(parsed.text_of(path)))
    return found


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def test_every_folder_is_a_layer() -> None:
    assert {layer_of(path) for path in FILES} <= {*BELOW, *ENTRY}


def test_the_table_has_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(BELOW):
        ready = {name for name, below in BELOW.items() if below <= done} - done
        assert ready, f"a cycle among {set(BELOW) - done}"
        done |= ready


@pytest.mark.parametrize("layer", sorted({layer_of(path) for path in FILES}))
def test_imports_only_what_lies_below(layer: str) -> None:
    allowed = ENTRY[layer] if layer in ENTRY else BELOW[layer] | {layer}
    wrong = []
    for path in [path for path in FILES if layer_of(path) == layer]:
        for line, module in imports(path):
            package, *rest = module.split(".")
            if package == "penstock" and rest and rest[0] not in allowed and module not in ALSO.get(layer, ()):
                wrong.append(f"{path}:{line}: {layer} imports {module}")
            if package == "penstock" and not rest and layer not in ENTRY:
                names = [m for at, m in imports(path) if at == line and m.startswith("penstock.")]
                if not names:
                    wrong.append(f"{path}:{line}: `import penstock` from inside hides which layer is meant")
    assert not wrong, "\n".join([*wrong, f"{layer} may import {sorted(allowed)}"])


NAMED = {
    "core/names/hints.py": "the text of an error about an unknown name, which looks through the settings of all layers",
    "envs/ids.py": "makers of simulators by id, imported when such an environment is made, in a process that has torch",
    "envs/builtin.py": "openings of names that a stranger's file may contain; nothing is imported by them",
}


@pytest.mark.parametrize("layer", sorted({layer_of(path) for path in FILES} - {*ENTRY, "cli"}))
def test_no_layer_names_one_above_it_by_a_string(layer: str) -> None:
    """A string that is a module or an object of the package is an import that is found at run time."""
    wrong = []
    for path in [x for x in FILES if layer_of(x) == layer and str(x.relative_to(ROOT)) not in NAMED]:
        for node in ast.walk(parsed.tree(parsed.text_of(path))):
            named = re.fullmatch(r"penstock\.(\w+)(\.\w+)*(:\w+)?", node.value) if is_text(node) else None
            if named and named[1] in BELOW and named[1] not in BELOW[layer] | {layer}:
                wrong.append(f"{path}:{node.lineno}: {layer} names {node.value}")
    assert not wrong, "\n".join(wrong)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_a_planted_edge_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(
        "def f():\n    from penstock import run, ops\n    import penstock.cli.main\n    import_module('penstock.x')\n"
    )
    assert {m for _, m in imports(path)} == {
        "penstock",
        "penstock.run",
        "penstock.ops",
        "penstock.cli.main",
        "penstock.x",
    }


def test_the_sampler_module_holds_protocols_alone() -> None:
    tree = parsed.tree(parsed.text_of(ROOT / "samplers" / "sampler.py"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [[ast.unparse(base) for base in node.bases] for node in classes] == [["Protocol"]] * len(classes)
    rest = [node for node in tree.body if not isinstance(node, (ast.ClassDef, ast.Import, ast.ImportFrom, ast.Expr))]
    assert not rest


def test_nothing_imports_the_conformance_suites() -> None:
    wrong = [path for path in FILES if layer_of(path) != "testing" for _, m in imports(path) if ".testing" in m]
    assert not wrong


def test_core_imports_numpy_and_optree_only() -> None:
    known = {"penstock", "", *sys.stdlib_module_names, *CORE_MAY}
    foreign = {f"{path}:{line}: {m}" for path in (ROOT / "core").glob("*.py") for line, m in imports(path)
               if m.split(".")[0] not in known}  # fmt: skip
    assert not foreign


@pytest.mark.parametrize("layer", ["core", "processes", "actors", "envs", "workers"])
def test_no_torch_in_layers_that_env_workers_import(layer: str) -> None:
    wrong = [
        f"{path}:{line}"
        for path in (ROOT / layer).rglob("*.py")
        for line, m in imports(path)
        if m.split(".")[0] == "torch"
    ]
    assert not wrong, f"torch imported in {wrong}"


def test_nothing_light_loads_torch() -> None:
    """Help must be quick and environment workers small; one process asks for them all, naming the first that loads it."""
    envs = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in (ROOT / "envs").rglob("*.py")]
    workers = [
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in (ROOT / "workers").glob("*.py")
    ]
    cli = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in (ROOT / "cli").glob("*.py")]
    light = [
        "penstock",
        "penstock.core",
        *sorted(envs),
        *sorted(workers),
        "penstock.samplers",
        "penstock.algos",
        "penstock.run.experiment",
        "penstock.run.plots.figure",
        "penstock.view.server",
        *cli,
    ]
    names = [name.removesuffix(".__init__") for name in light]
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([*PYTHON, code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
