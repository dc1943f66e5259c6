"""Files of exported policies, ONNX, `.pt2` or safetensors, each checked before it is written, and their contracts."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import importlib.metadata
import io
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from penstock.core import VERSION
from penstock.core.errors import CheckpointError, ConfigError, MissingExtraError, nearest
from penstock.core.files import require_name, write_atomic
from penstock.core.spec import LeafSpec, plain_numbers
from penstock.core.tree import tree_leaves, tree_names
from penstock.learn.export.check import TOLERANCE, Acting, Agreement, Array, Execute, check
from penstock.learn.export.graph import ActingGraph, Port, first_cause, said_module, summary, traced
from penstock.learn.policy_file import read_policy_file

if TYPE_CHECKING:
    from penstock.learn.policy import Policy

Form = Literal["onnx", "pt2", "safetensors"]
FORMS: tuple[str, ...] = get_args(Form)
FORMAT = 1
METADATA = "metadata.json"
_ONNX = ("onnx", "onnxscript", "onnxruntime")
_OPENED_BY = {"onnx": "onnxruntime.InferenceSession", "pt2": "torch.export.load", "safetensors": "penstock.load"}


def form_of(path: Path, to: str | None) -> str:
    """The format of a file: `to`, or by default its suffix.

    Raises:
        ConfigError: none of the formats, another suffix, or a place where no file can be.
    """
    form = path.suffix.removeprefix(".") if to is None else _known(to)
    if path.suffix != f".{form}" or form not in FORMS:
        raise ConfigError(
            f"export to {str(path)!r}; expected a name that ends in .{' or .'.join([to] if to else FORMS)}"
        )
    require_name(path, "the file")
    if path.is_dir():
        raise ConfigError(f"export: {path} is a folder; expected the name of a file")
    return form


def folder_form(folder: Path, to: str | None, policies: Sequence[str]) -> str:
    """The format of the files of several policies. Raises ConfigError without one, or for a place of no folder."""
    if to is None or folder.suffix.removeprefix(".") in FORMS or (folder.exists() and not folder.is_dir()):
        raise ConfigError(
            f"export to {str(folder)!r} of the policies {list(policies)}; expected a folder, for a file of each, and "
            "to='onnx' (--to onnx); or one of them, policies[ID].export(FILE) (--policy ID)"
        )
    if unnamed := [name for name in policies if Path(name).name != name]:
        raise ConfigError(f"export: policy {unnamed[0]!r} can be no name of a file; export it alone (--policy ID)")
    require_name(folder, "the folder")
    return _known(to)


def _known(to: str) -> str:
    if to not in FORMS:
        raise ConfigError(f"export(to={to!r}); {nearest(to, FORMS)}")
    return to


def contract_path(path: Path) -> Path:
    """Where the contract of an exported file lies: beside it, `policy.onnx.contract.json`."""
    return path.with_name(f"{path.name}.contract.json")


def export_policy(
    policy: Policy, path: str | Path, to: str | None = None, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Writes the file and its contract; see `Policy.export`."""
    path = Path(path)
    form, said = form_of(path, to), _plain(metadata or {})
    acting = _acting(policy)
    graph = ActingGraph(acting.agent, acting.spec, acting.seen)
    opset, packages = None, ["torch"]
    if form == "onnx":
        data, opset, execute = _onnx(graph, said)
        packages += _ONNX
    elif form == "pt2":
        data, execute = _pt2(graph, said)
    else:
        data, execute = _safetensors(policy, acting)
        packages += ["safetensors"]
    found = check(acting, graph.inputs, execute)
    contract = {
        "format": FORMAT,
        "file": path.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "to": form,
        "opened_by": _OPENED_BY[form],
        "algorithm": type(policy.algorithm).__name__,
        "actions": "deterministic",
        **_ports(graph, acting),
        "normalization": _normalization(acting),
        **({"metadata": said} if said else {}),
        "opset": opset,
        "versions": {"penstock": VERSION, **{name: importlib.metadata.version(name) for name in packages}},
        "checked": _checked(found),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
        write_atomic(contract_path(path), json.dumps(contract, indent=1).encode() + b"\n")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    return path


def _acting(policy: Policy) -> Acting:
    agent, spec = policy.agent.exported(), policy.spec
    if any(x.device.type != "cpu" for x in (*agent.parameters(), *agent.buffers())):
        agent = copy.deepcopy(agent).cpu()
    seen = spec.obs
    if agent.unseen and isinstance(seen, dict):
        seen = {key: leaf for key, leaf in seen.items() if key not in agent.unseen}
    return Acting(agent, spec, seen)


def _onnx(graph: ActingGraph, metadata: dict[str, Any]) -> tuple[bytes, int, Execute]:
    """The model's bytes and its opset, and the model in onnxruntime."""
    for package in _ONNX:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingExtraError(package, "export") from error
    import onnxruntime  # pyright: ignore[reportMissingImports]

    program = traced(graph)
    names = [port.name for port in graph.inputs], [port.name for port in graph.outputs]
    try:
        with _quiet():
            model: Any = torch.onnx.export(
                program, input_names=names[0], output_names=names[1], dynamo=True, verbose=False
            )
    except Exception as error:
        cause = first_cause(error)
        raise ConfigError(
            f"{_unwritable(program, cause)} cannot be written as ONNX: {summary(cause)}; export it to='pt2', "
            "or replace the module (docs/export.md)"
        ) from error
    proto = model.model_proto
    for name, value in metadata.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = name, _joined(value)
    data = proto.SerializeToString()
    opset = max(int(entry.version) for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def execute(inputs: list[Array]) -> list[Array]:
        return list[Any](session.run(names[1], dict(zip(names[0], inputs))))

    return data, opset, execute


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata as JSON has it, infinities as text. Raises ConfigError unless all are text, numbers or lists."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(metadata)), parse_constant=lambda x: str(float(x)))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"metadata of an export: {error}; expected text, numbers and lists of these by name"
        ) from error
    for name, value in found.items():
        if not name or isinstance(value, dict) or value is None:
            raise ConfigError(
                f"metadata of an export: {name!r} is {value!r}; expected text, a number, or a list of these, by name"
            )
    return found


def _joined(value: Any, by: str = ",") -> str:
    """A value as text: the parts of a list joined by commas, of a list in it by semicolons, as mjlab reads them."""
    return by.join(_joined(x, ";") for x in value) if isinstance(value, list) else str(value)


def _unwritable(program: torch.export.ExportedProgram, error: BaseException) -> str:
    """The innermost module that has the operation which an error names, else the policy."""
    named = re.search(r"op='\w+\.(\w+)'", str(error))
    for node in program.graph.nodes:
        stack = [*node.meta.get("nn_module_stack", {}).values()]
        if named and node.op == "call_function" and stack and named[1] in str(node.target):
            path, kind = stack[-1]
            return said_module(path, kind if isinstance(kind, str) else kind.__name__)
    return "the policy"


def _pt2(graph: ActingGraph, metadata: dict[str, Any]) -> tuple[bytes, Execute]:
    """The program's bytes, and what torch loads from them."""
    file = io.BytesIO()
    with _quiet():
        torch.export.save(traced(graph), file, extra_files={METADATA: json.dumps(metadata)} if metadata else None)
        module = torch.export.load(io.BytesIO(file.getvalue())).module()
    return file.getvalue(), _executor(module)


def _safetensors(policy: Policy, acting: Acting) -> tuple[bytes, Execute]:
    """The bytes of `policy.save`, and a policy that was built from them."""
    with tempfile.TemporaryDirectory() as folder:
        file = policy.save(Path(folder) / "policy.safetensors")
        data, parameters = file.read_bytes(), read_policy_file(file).parameters
    algorithm: Any = policy.algorithm
    built = algorithm.build(policy.spec, seed=policy.seed)
    try:
        built.load_parameters(parameters)
    except CheckpointError as error:
        raise ConfigError(
            f"{type(algorithm).__name__} builds another agent than this policy has, so ps.load could not open the "
            "file; export it to='onnx' or 'pt2'"
        ) from error
    return data, _executor(ActingGraph(built.agent.exported(), acting.spec, acting.seen))


def _executor(module: Any) -> Execute:
    def execute(inputs: list[Array]) -> list[Array]:
        with torch.inference_mode():
            return [x.numpy() for x in module(*map(torch.from_numpy, inputs))]

    return execute


def _ports(graph: ActingGraph, acting: Acting) -> dict[str, Any]:
    leaves = dict(zip(tree_names(acting.seen, "obs"), tree_leaves(acting.seen)))
    leaves |= dict(zip(tree_names(acting.spec.action, "action"), tree_leaves(acting.spec.action)))

    def said(port: Port) -> dict[str, Any]:
        space = {"space": _space(leaves[port.name])} if port.name in leaves else {}
        return {"name": port.name, "dtype": port.dtype, "shape": ["batch", *port.shape], **space}

    state = [
        {"input": port.name, "output": f"next_{port.name}", "dtype": port.dtype, "shape": [*port.shape]}
        for port in graph.state
    ]
    return {"inputs": [*map(said, graph.inputs)], "outputs": [*map(said, graph.outputs)], "state": state}


def _space(leaf: LeafSpec) -> dict[str, Any]:
    if leaf.kind == "box":
        return {"kind": leaf.kind, "low": plain_numbers(leaf.low), "high": plain_numbers(leaf.high)}
    return {"kind": leaf.kind, "sizes": [*leaf.sizes], "start": plain_numbers(leaf.start)}


def _normalization(acting: Acting) -> dict[str, Any]:
    """Mean and variance by the name of the observation's part; the graph itself applies them."""
    preparation = acting.agent.preparation
    if (normalizer := preparation.normalizer) is None:
        return {}
    named = zip(tree_names(preparation.obs, "obs"), normalizer.moments)
    return {
        name: {"mean": moments.mean.tolist(), "var": moments.var.tolist(), "clip": normalizer.clip}
        for name, moments in named
        if len(moments.mean)
    }


def _checked(found: Agreement) -> dict[str, Any]:
    return {
        "against": "predict",
        "observations": found.observations,
        "steps": found.steps,
        "largest_difference": found.difference,
        "tolerance": TOLERANCE,
        "ties": found.ties,
    }


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Without the remarks of torch's exporters, which are about their own inside."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
