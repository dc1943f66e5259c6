from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from types import GenericAlias, ModuleType, UnionType
from typing import Any, get_type_hints

import pytest

import penstock as ps
from tests.parsed import PACKAGE, ROOT, code_lines, named_calls, nodes, text_of

OTHERS = sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
EVERY = (*PACKAGE, *OTHERS)
CODE_LINES = 49_230
"""Of the package, at most. Growth is not free: who needs more raises it, and says what it buys."""
MAX_WIDTH = 120
MAX_FILES = 17
LISTS = {"algos", "cli", "envs/toy"}
"""Folders of alike things, which may hold any number."""
MAX_UNFORMATTED = 40
DEPENDENCIES = {
    "torch", "numpy", "gymnasium", "optree", "rich", "psutil", "safetensors", "cloudpickle",
}  # fmt: skip
WAITS = {"wait", "join", "get", "recv", "acquire", "result", "communicate", "select", "poll"}
BOUNDED_ELSEWHERE = {
    ("penstock/samplers/collector.py", "pool.recv"): "EnvPool.recv: each pool has a deadline of its own",
    ("penstock/testing/pools.py", "pool.recv"): "the same",
    ("penstock/envs/envpool.py", "self.recv"): "the library EnvPool waits for a step without a limit, as ale-py does",
    ("penstock/envs/envpool.py", "self._pool.recv"): "the same",
    ("penstock/learn/slot_partition.py", "_present.get"): "ContextVar.get returns at once",
    ("penstock/run/playing/video.py", "process.poll"): "Popen.poll returns at once",
}
MAY_UNPICKLE = {
    (
        "penstock/processes/serialization.py",
        "cloudpickle.loads",
    ): "the one place in which what has travelled is unpickled",
    ("penstock/workers/host.py", "unship"): "a child process reads what its own parent left in a memfd",
    ("penstock/workers/env_check.py", "unship"): "the same",
    ("penstock/actors/runner_process.py", "unship"): "the same, by a socket pair",
    ("penstock/samplers/runners/share.py", "unship"): "a runner reads what its own owner sent it",
    ("penstock/samplers/runners/agent_bytes.py", "unship"): "the same, of an agent",
    ("penstock/core/names/declared.py", "eval"): "types and default values in this package's own source",
    ("penstock/run/learners/learner.py", "unship"): "a learner reads what its own rank 0 sent it",
    ("penstock/replay/shard.py", "unship"): "a shard reads what its own learner sent it",
    ("penstock/studies/rsl_rl.py", "yaml.load"): "a SafeLoader that knows one tag more, for tuples",
    ("penstock/run/playing/eval_workers.py", "unship"): "the same",
    ("penstock/run/playing/copies.py", "pickle"): "copies of an environment in the memory of the process that made it",
}
CHANGING = {"weights_only", "allow_pickle", "shell"}
"""Arguments that make a call run data, or keep it from that."""
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "shelve", "marshal", "joblib"}
MAY_DATE = {"penstock/run/tracking/on_mlflow.py": "MLflow's metrics carry the date"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def where(find: Callable[[str], Any], paths: Iterable[Path] = PACKAGE) -> dict[str, Any]:
    """What `find` sees in the text of each file, by the file's name; files in which it sees nothing are left out."""
    return {relative(path): found for path in paths if (found := find(text_of(path)))}


def has_limit(call: ast.Call) -> bool:
    """True if the call has an argument that is not None, or a timeout that is not None."""
    named = [k.value for k in call.keywords if k.arg in ("timeout", "timeout_s", "deadline", None)]
    given = [*call.args, *named]
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in given)


def unbounded_waits(text: str) -> list[tuple[int, str]]:
    """Calls that may block for ever: `.wait()` and its like with nothing in the brackets, subprocess.run without timeout."""
    found: list[tuple[int, str]] = []
    for call, name in named_calls(text):
        last = name.split(".")[-1]
        if name in ("subprocess.run", "subprocess.check_output", "subprocess.check_call", "subprocess.call"):
            if not any(k.arg == "timeout" for k in call.keywords):
                found.append((call.lineno, name))
        elif isinstance(call.func, ast.Attribute) and last in WAITS and name != "select.poll" and not has_limit(call):
            found.append((call.lineno, name))
        elif (
            last == "get" and [ast.unparse(a) for a in call.args] == ["True"] and not any(k.arg for k in call.keywords)
        ):
            found.append((call.lineno, name))  # queue.get(block=True)
    return found


def unsafe_loads(text: str) -> list[tuple[int, str]]:
    """Whatever could run code out of data."""
    found: list[tuple[int, str]] = []
    for node in nodes(text):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [(node.lineno, m) for m in modules if m.split(".")[0] in UNPICKLERS]
    for call, name in named_calls(text):
        keywords = {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg in CHANGING}
        if name in ("eval", "exec", "compile", "__import__", "unship") or re.fullmatch(
            r"(cloudpickle|pickle)\.loads?", name
        ):
            found.append((call.lineno, name))
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            found.append((call.lineno, name))
        if name in ("torch.load", "load_state_dict_from_url") and keywords.get("weights_only") != "True":
            found.append((call.lineno, f"{name} without weights_only=True"))
        if name in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False":
            found.append((call.lineno, f"{name} with allow_pickle"))
        if keywords.get("shell") == "True" or name in ("os.system", "os.popen"):
            found.append((call.lineno, f"{name} through a shell"))
    return found


def test_every_file_says_in_its_first_line_what_it_is() -> None:
    silent = where(lambda text: not re.match(r'"""[^\s"]', text) and text.splitlines()[:1], EVERY)
    assert not silent, "expected a docstring"


def test_the_package_does_not_grow_unseen() -> None:
    assert sum(map(code_lines, PACKAGE)) <= CODE_LINES


def test_every_file_is_narrow() -> None:
    wide = where(lambda text: [i for i, line in enumerate(text.splitlines(), 1) if len(line) > MAX_WIDTH])
    assert not wide, f"lines have more than {MAX_WIDTH} characters"


def test_no_folder_is_crowded() -> None:
    folders: dict[str, int] = {}
    for path in PACKAGE:
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(ROOT / "penstock"))
            folders[folder] = folders.get(folder, 0) + 1
    crowded = {name: n for name, n in folders.items() if n > MAX_FILES and name not in LISTS}
    assert not crowded, f"more than {MAX_FILES} files: {crowded}; a folder is about one thing too"


def test_little_is_kept_from_the_formatter() -> None:
    marks = sum(text_of(path).count("# fmt: ") for path in PACKAGE)
    assert marks < MAX_UNFORMATTED, f"{marks} marks; say it in a shape that the formatter keeps"


def test_no_file_has_notes_to_self() -> None:
    assert not where(lambda text: re.findall(r"\b(TODO|FIXME|XXX|HACK)\b", text), EVERY)


def excepted(found: dict[str, Any], allowed: Container[tuple[str, str]]) -> dict[str, Any]:
    """Lines and names of each file that are not allowed there."""
    left = {path: [(line, name) for line, name in seen if (path, name) not in allowed] for path, seen in found.items()}
    return {path: seen for path, seen in left.items() if seen}


@pytest.mark.slow
def test_no_file_runs_what_it_loads() -> None:
    assert not excepted(where(unsafe_loads), MAY_UNPICKLE)


def test_no_file_waits_for_anything_for_ever() -> None:
    assert not excepted(where(unbounded_waits), BOUNDED_ELSEWHERE), "these wait without a limit"


@pytest.mark.parametrize(
    "text",
    [
        "p.wait()", "t.join()", "t.join(None)", "q.get()", "q.get(True)", "c.recv()", "lock.acquire()", "f.result()",
        "p.wait(timeout=None)", "subprocess.run(['x'])", "p.communicate()", "self._poll.poll()", "s.select()",
    ],
)  # fmt: skip
def test_the_scan_sees_every_way_to_wait(text: str) -> None:
    assert unbounded_waits(text)


@pytest.mark.parametrize(
    "text",
    ["p.wait(timeout=1.0)", "', '.join(x)", "d.get('k')", "q.get(timeout=2)", "lock.acquire(timeout=1)", "t.join(5)",
     "subprocess.run(['x'], timeout=2)"],
)  # fmt: skip
def test_the_scan_lets_bounded_calls_pass(text: str) -> None:
    assert not unbounded_waits(text)


def test_every_file_measures_with_a_clock_that_is_never_set() -> None:
    """`time.time` jumps when the clock is set; it may only date what a person reads."""
    found = where(lambda text: [call.lineno for call, name in named_calls(text) if name == "time.time"])
    assert found.keys() <= MAY_DATE.keys(), f"time.time in {found}; use time.monotonic"


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from pickle import loads", "cloudpickle.loads(b)", "eval('1')", "exec(t)", "yaml.load(f)", "torch.load(p)",
     "torch.load(p, weights_only=False)", "np.load(p, allow_pickle=True)", "subprocess.run(t, shell=True)"],
)  # fmt: skip
def test_the_scan_sees_every_way_to_run_data(text: str) -> None:
    assert unsafe_loads(text)


def test_the_allowed_exceptions_exist() -> None:
    stale = [key for key in (*BOUNDED_ELSEWHERE, *MAY_UNPICKLE) if key[1] not in (ROOT / key[0]).read_text()]
    assert not stale, f"no longer there: {stale}"


def test_the_core_installs_eight_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=!~\[; ]", text)[0] for text in project["dependencies"]]
    assert set(names) == DEPENDENCIES
    assert len(names) == len(DEPENDENCIES)
    assert "dependencies" not in project.get("dynamic", [])


def test_imports_nothing_that_is_not_installed_with_it() -> None:
    """Of the extras only where a helper says which to install; see the allow-list."""
    extras = {"ale_py", "cv2", "imageio_ffmpeg", "pygame", "ray", "mujoco", "optuna", "pettingzoo", "envpool"}
    extras |= {"onnxruntime", "huggingface_hub", "matplotlib", "wandb", "mlflow", "trackio", "yaml"}
    extras |= {"pandas"}  # no extra: Runs.frame() hands a table to who has it
    foreign: dict[str, set[str]] = {}
    for path in PACKAGE:
        for node in nodes(text_of(path)):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                foreign.setdefault(module.split(".")[0], set()).add(relative(path))
    for known in (*sys.stdlib_module_names, *DEPENDENCIES, *extras, "penstock"):
        foreign.pop(known, None)
    assert not foreign


@pytest.mark.parametrize("name", ps.__all__)
def test_every_public_name_is_there_and_explained(name: str) -> None:
    value = getattr(ps, name)
    if isinstance(value, str):  # the version
        return
    if isinstance(value, (GenericAlias, UnionType)):  # an alias: the text stands under its assignment
        source = ast.parse(inspect.getsource(importlib.import_module(ps._WHERE[name])))  # pyright: ignore
        after = [b for a, b in zip(source.body, source.body[1:]) if isinstance(a, (ast.Assign, ast.AnnAssign))
                 and name in ast.unparse(a).split("=")[0]]  # fmt: skip
        assert after, f"{name} is not assigned where the table says"
        assert isinstance(after[0], ast.Expr), f"{name} has no docstring"
        return
    text = value.__doc__ if isinstance(value, ModuleType) else inspect.getdoc(value)
    assert text, f"{name} has no docstring"
    assert not text.startswith(f"{name}("), f"{name} has only the docstring that its decorator made"
    assert text.split("\n")[0].rstrip()[-1] in ".:", f"{name}: the first line is no sentence: {text.splitlines()[0]!r}"


def test_unknown_public_name_gives_the_nearest() -> None:
    with pytest.raises(AttributeError, match="SerialSampler"):
        ps.SerialSamplr  # noqa: B018


def test_the_lazy_table_and_the_typed_imports_agree() -> None:
    tree = ast.parse(inspect.getsource(ps))
    block = next(n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))
    typed = {a.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    table = {**ps._WHERE, "ops": "penstock"}  # pyright: ignore
    assert typed == table


@pytest.mark.parametrize(
    "name", ["A2C", "PPO", "IMPALA", "APPO", "RunConfig", "Experiment", "EnvConfig", "SerialSampler", "Net"]
)
def test_every_setting_is_explained_at_its_field(name: str) -> None:
    cls = getattr(ps, name)
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    statements = body.body
    bare = [ast.unparse(a.target) for a, b in zip(statements, [*statements[1:], None]) if isinstance(a, ast.AnnAssign)
            and not (isinstance(b, ast.Expr) and isinstance(b.value, ast.Constant) and isinstance(b.value.value, str))]  # fmt: skip
    assert not bare, f"{name}: no docstring under {bare}"
    assert set(get_type_hints(cls)) >= {f for f in getattr(cls, "__dataclass_fields__", {})}
