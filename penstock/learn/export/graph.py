"""ActingGraph: a policy as a module from named tensors to named tensors, and its trace by `torch.export`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock.agents.agent import Agent, ExportableAgent
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_names, tree_structure, tree_unflatten

_AGENT = "acting.agent"
"""The agent's path in an ActingGraph."""
_ROWS = 3
"""Rows of the examples; another number than any batch that `check` acts on."""


class Port(NamedTuple):
    """A tensor that goes into the graph or comes out of it; its first dimension is the batch."""

    name: str
    shape: tuple[int, ...]
    """Shape of one row, without the batch dimension."""
    dtype: str


class ActingGraph(nn.Module):
    """Acts on tensors [N, ...] by position, as `Policy.predict` does: normaliser, mask, memory, mode and bounds inside.

    In: the leaves of the observation; with memory the leaves of its state, which end with the previous action if the
    networks read it, `first` [N] bool and, if they read it, `prev_reward` [N] float32.
    Out: the leaves of the action in the environment's dtypes, then those of the next state. Where `first` is True the
    state is not read.

    Args:
        seen: spec of the observation without what only critics see.
    """

    def __init__(self, agent: Agent, spec: EnvSpec, seen: Tree) -> None:
        super().__init__()
        self.acting = ExportableAgent(agent)
        self._obs, self._action = tree_structure(seen), tree_structure(spec.action)
        self._dtypes = [_torch_dtype(leaf.dtype) for leaf in tree_leaves(spec.action)]
        state = agent.initial_state(_ROWS)
        self._state = tree_structure(state)
        self.memory = state is not None
        self._null = tree_map(lambda leaf: torch.from_numpy(np.array(leaf.null())), spec.action)
        rows = [_zeros(leaf.shape, leaf.dtype) for leaf in tree_leaves(seen)]
        obs = [Port(*port) for port in zip(_names(seen, "obs"), _shapes(rows), _dtypes(rows))]
        first = torch.ones(_ROWS, dtype=torch.bool)
        reads = agent.fed if self.memory else frozenset[str]()
        self._reads_action, self._reads_reward = "prev_action" in reads, "prev_reward" in reads
        inputs = Inputs(tree_unflatten(self._obs, rows), self._rows_of_null(_ROWS), torch.zeros(_ROWS), first)
        with torch.no_grad():
            chosen, _, after = agent.act(inputs, state, None)
        carried = [*tree_leaves(after), *(tree_leaves(chosen) if self._reads_action else [])]
        self.state = [Port(f"state.{i}", *x) for i, x in enumerate(zip(_shapes(carried), _dtypes(carried)))]
        more = [Port("first", (), "bool")] * self.memory + [Port("prev_reward", (), "float32")] * self._reads_reward
        self.inputs = [*obs, *self.state, *more]
        leaves = tree_leaves(spec.action)
        actions = zip(_names(spec.action, "action"), (leaf.shape for leaf in leaves), (leaf.dtype for leaf in leaves))
        self.outputs = [Port(*port) for port in actions] + [
            port._replace(name=f"next_{port[0]}") for port in self.state
        ]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs in the order of `outputs`, for inputs in the order of `inputs`."""
        given = list(tensors)
        n = given[0].shape[0]
        obs = tree_unflatten(self._obs, _taken(given, self._obs.num_leaves))
        state = tree_unflatten(self._state, _taken(given, self._state.num_leaves))
        prev_action = self._rows_of_null(n)
        if self._reads_action:
            prev_action = tree_unflatten(self._action, _taken(given, self._action.num_leaves))
        first = given.pop(0) if self.memory else torch.ones(n, dtype=torch.bool)
        prev_reward = given.pop(0) if self._reads_reward else torch.zeros(n)
        inputs = Inputs(obs, prev_action, prev_reward, first)
        chosen, _, after = self.acting.agent.act(inputs, state, None)
        action = [x.to(dtype) for x, dtype in zip(tree_leaves(self.acting.bounded(chosen)), self._dtypes)]
        # An output that is an input, such as a previous action that passes, would have two names.
        carried = [*tree_leaves(after), *(tree_leaves(chosen) if self._reads_action else [])]
        return (*action, *(x.clone() for x in carried))

    def _rows_of_null(self, n: int) -> Tree:
        return tree_map(lambda x: x.expand(n, *x.shape), self._null)

    def examples(self) -> tuple[Tensor, ...]:
        """Inputs of a few rows, zeros but where an episode begins."""
        return tuple(_zeros(port.shape, port.dtype).fill_(port.name == "first") for port in self.inputs)


def traced(graph: ActingGraph) -> torch.export.ExportedProgram:
    """The graph by `torch.export`, for batches of any size. Raises ConfigError that names the module that fails."""
    try:
        return _traced(graph)
    except Exception as error:
        raise ConfigError(
            f"{_failing(graph)} cannot be traced by torch.export: {summary(error)}; expected torch operations on "
            "tensors alone, the same for every value and number of rows (docs/export.md)"
        ) from error


def _traced(graph: ActingGraph) -> torch.export.ExportedProgram:
    examples = graph.examples()
    rows = ({0: torch.export.Dim("batch", min=1)},) * len(examples)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(graph, examples, dynamic_shapes=(rows,), strict=False)


def _failing(graph: ActingGraph) -> str:
    """The innermost module in whose `forward` a trace ends, or the number of rows is fixed; else the agent.

    It is seen by hooks in a second trace, as hooks change which kernels run.
    """
    entered: list[str] = []
    fixing: list[str] = []
    handles: list[Any] = []

    def watch(module: nn.Module, said: str) -> None:
        def enter(_: nn.Module, given: Any) -> None:
            entered.append(said)

        def leave(_: nn.Module, given: Any, found: Any) -> None:
            entered.pop()
            if any(isinstance(x, Tensor) and x.ndim and _is_fixed(x.shape[0]) for x in given):
                fixing.append(said)

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))

    for name, module in graph.named_modules():
        if name.startswith(f"{_AGENT}."):
            watch(module, said_module(name, type(module).__name__))
    try:
        _traced(graph)
    except Exception:
        pass  # it is the first trace's error that is told
    finally:
        for handle in handles:
            handle.remove()
    return (entered[-1:] + fixing[:1] + [f"act() of {type(graph.acting.agent).__name__}"])[0]


def said_module(path: str, kind: str) -> str:
    """A module of the graph as messages name it: by its path in the agent, and its class."""
    name = path.removeprefix(_AGENT).lstrip(".")
    return f"module {name} ({kind.rpartition('.')[2]})" if name else "act() of the agent"


def _is_fixed(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is not None


def first_cause(error: BaseException) -> BaseException:
    """The error that others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def summary(error: BaseException) -> str:
    """The type of an error, and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if text.startswith("Constraints violated"):
        text = f"it works for {_ROWS} rows alone, of which the example was"
    return f"{type(error).__name__}: {text}"[:300]


def _taken(given: list[Tensor], count: int) -> list[Tensor]:
    """Removes that many tensors from the front and returns them."""
    front, given[:count] = given[:count], []
    return front


def _names(tree: Tree, root: str) -> list[str]:
    names = tree_names(tree, root)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two parts of {root} would both be named {twice[0]!r}; give its keys names without dots")
    return names


def _zeros(shape: Sequence[int], dtype: str) -> Tensor:
    return torch.zeros((_ROWS, *shape), dtype=_torch_dtype(dtype))


def _torch_dtype(dtype: str) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype


def _shapes(rows: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(x.shape[1:]) for x in rows]


def _dtypes(rows: Sequence[Tensor]) -> list[str]:
    return [str(x.dtype).removeprefix("torch.") for x in rows]
