"""The one loop in which agents meet environments; every sampler that steps them and every evaluation call it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.agents.parameters import agent_device
from penstock.core.batch import Inputs, SampleBatch, padded_rows
from penstock.core.noise import HeldNoise, Noise, Purpose
from penstock.core.tree import Tree, is_leaf, tree_leaves, tree_map, tree_structure, tree_unflatten
from penstock.envs.pools.pool import BatchColumns, Group, Ints
from penstock.samplers.tensors.noise import rows_on
from penstock.samplers.tensors.views import TensorViews


class GroupViews:
    """Torch views of one group's slots in a batch, row by row, made once for each buffer."""

    def __init__(
        self, batch: SampleBatch, slots: slice, null_action: Tree, device: torch.device, noise_size: int
    ) -> None:
        T, _ = batch.spec
        self.n = slots.stop - slots.start
        self.padded = padded_rows(self.n)
        self.device = device
        self.direct = self.n == self.padded and device.type == "cpu"
        tensors = tree_map(lambda x: torch.from_numpy(x)[:, slots], tuple(batch.inputs))
        self.inputs = [Inputs(*tree_map(lambda x, t=t: x[t], tensors)) for t in range(T)]
        self._rows = [tree_leaves(row) for row in self.inputs]
        self._structure = tree_structure(self.inputs[0])
        missing = self.padded - self.n
        self._padding = [x.new_zeros(missing, *x.shape[1:], device=device) for x in self._rows[0]] if missing else []
        # An agent without memory keeps no view of its inputs, so one row serves for all and for each batch's noise.
        self._reused = bool(missing) and device.type == "cpu" and batch.state is None
        if self._reused:
            self._shown = tree_map(lambda x: x.new_zeros(self.padded, *x.shape[1:]), self.inputs[0])
            self._copied = [x[: self.n].numpy() for x in tree_leaves(self._shown)]
            self._arrays = [[x.numpy() for x in row] for row in self._rows]
            self._noise = torch.full((T, self.padded, noise_size), 0.5)
            self._noise_rows, self._drawn = list(self._noise), self._noise[:, : self.n].numpy()
        self._valid = [batch.valid[t, slots] for t in range(T)]
        self._actions = [x[:, slots] for x in tree_leaves(batch.action)]
        self._null = tree_leaves(null_action)
        self._state = [x[slots] for x in tree_leaves(batch.state)]
        self._columns = batch.obs, batch.action, batch.info, slots
        agent_info = {k: v for k, v in batch.info.items() if k != "env"}
        outputs = [torch.from_numpy(x)[:, slots] for x in tree_leaves((batch.action, agent_info))]
        self.outputs = [[x[t] for x in outputs] for t in range(T)]
        self.leaves = answer_leaves(batch.action, agent_info)

    def served(self, agent: LoopAgent, noise: npt.NDArray[np.float32] | None) -> Callable[[int], None] | None:
        """Acts for row t by one call of the native kernel; None where the agent's `act` must be called."""
        acting = agent.by_kernel(noise is not None) if isinstance(agent, Agent) and self.device.type == "cpu" else None
        obs, action, info, slots = self._columns
        found = obs, action, info.get("logp"), noise
        if acting is None or not all(x is None or isinstance(x, np.ndarray) for x in found):
            return None
        return acting.rows(*(None if x is None else x[:, slots] for x in found))

    def record_state(self, state: Tree) -> None:
        """Writes the recurrent state before row 0 [padded, ...] into the batch."""
        if state is not None or self._state:
            for x, y in zip(self._state, tree_leaves(state), strict=True):
                x[...] = y[: self.n].cpu().numpy()

    def null_ignored(self, t: int) -> None:
        """Puts the null action where row t was a reset or idle, before the next row is served.

        So an agent acts on the same previous action that the record shows it in training.
        """
        valid = self._valid[t].tobytes()  # five times as fast as a numpy reduction, and it is asked at every step
        b = valid.find(0)
        while b >= 0:
            for x, null in zip(self._actions, self._null):
                x[t, b] = null
            b = valid.find(0, b + 1)

    def input(self, t: int) -> Inputs:
        """[padded, ...] inputs of row t where the agent is; rows of padding are zero."""
        if self.direct:
            return self.inputs[t]
        if self._reused:
            for x, y in zip(self._copied, self._arrays[t]):
                x[...] = y
            return self._shown
        leaves = self._rows[t]
        if self.device.type != "cpu":
            leaves = [x.to(self.device, non_blocking=True) for x in leaves]
        if self._padding:
            leaves = [torch.cat(parts) for parts in zip(leaves, self._padding)]
        return tree_unflatten(self._structure, leaves)

    def noise(self, noise: np.ndarray[Any, Any] | None, slots: slice) -> list[Tensor] | list[None]:
        """[padded, noise_size] for every row."""
        if noise is None:
            return [None] * len(self.inputs)
        rows = noise[:, slots]
        if self._reused:
            self._drawn[...] = rows
            return self._noise_rows
        if self.n != self.padded:
            rows = np.full((len(noise), self.padded, noise.shape[2]), 0.5, np.float32)
            rows[:, : self.n] = noise[:, slots]
        tensor = torch.from_numpy(rows)
        return list((tensor if self.device.type == "cpu" else tensor.to(self.device)).unbind(0))


class TurnViews:
    """Views of one group's columns in a batch of turns: gathers the columns that wait, and scatters the answers.

    The recurrent states of a group are `{"now": ..., "before": ...}`, each [b, ...]: after the last turn of every
    column, and before the turn in row 0 of the next batch (the last turn, if it is still open).
    """

    def __init__(
        self, batch: SampleBatch, slots: slice, null_action: Tree, device: torch.device, noise_size: int
    ) -> None:
        self.n, self.device = slots.stop - slots.start, device
        self.padded = self.n  # turns are padded where they are gathered
        self._start = slots.start
        self._inputs = tree_leaves(tuple(batch.inputs))
        self._structure = tree_structure(batch.inputs)
        agent_info = {k: v for k, v in batch.info.items() if k != "env"}
        self._outputs = tree_leaves((batch.action, agent_info))
        self._leaves = answer_leaves(batch.action, agent_info)
        self._info = [x[:, slots] for x in tree_leaves(agent_info)]
        self._valid = batch.valid[:, slots]
        self._state = [x[slots] for x in tree_leaves(batch.state)]
        self._last = np.zeros(self.n, np.int64)  # the row of each column's last turn

    def clear(self) -> None:
        """Makes every row's info 0, before the pool brings the open turns of the batch before: not all have a turn."""
        for x in self._info:
            x[...] = 0

    def record_state(self, state: Tree) -> None:
        """Writes the recurrent state before row 0 into the batch."""
        self._last[:] = 0
        if state is not None:
            for x, y in zip(self._state, tree_leaves(state["before"]), strict=True):
                x[...] = y.cpu().numpy()

    def act(
        self, agent: LoopAgent, slots: Ints, rows: Ints, state: Tree, noise: npt.NDArray[np.float32] | None
    ) -> None:
        """Acts for the turns that wait, in `rows` [n] of the batch's columns `slots` [n]."""
        n, padded = len(slots), padded_rows(len(slots))

        def put(x: npt.NDArray[Any], fill: float = 0) -> Tensor:
            turns = np.ascontiguousarray(x[rows, slots])
            if n != padded:
                turns = np.concatenate([turns, np.full((padded - n, *x.shape[2:]), fill, x.dtype)])
            return torch.from_numpy(turns).to(self.device)

        inputs = tree_unflatten(self._structure, [put(x) for x in self._inputs])
        uniforms = None if noise is None else put(noise, 0.5)
        if state is None:
            action, info, _ = agent.act(inputs, None, uniforms)
        else:
            local = slots - self._start
            self._last[local] = rows
            index = torch.from_numpy(local).to(self.device)
            given = tree_map(lambda x: _padded(x[index], padded), state["now"])
            action, info, after = agent.act(inputs, given, uniforms)
            for now, before, new in zip(tree_leaves(state["now"]), tree_leaves(state["before"]), tree_leaves(after)):
                before[index] = now[index]
                now[index] = new[:n]
        for out, value in zip(self._outputs, self._leaves(action, info)):
            out[rows, slots] = value.cpu().numpy()[:n]

    def noise(self, noise: npt.NDArray[np.float32] | None, slots: slice) -> npt.NDArray[np.float32] | None:
        """The batch's noise, of which `act` takes that of the turns."""
        return noise

    def null_ignored(self, sweep: int) -> None:
        """Does nothing: a pool whose agents take turns shows the null action after a reset row itself."""

    def finish(self, state: Tree) -> None:
        """Called when the batch is complete: the state before row 0 of the next is the one after every closed turn."""
        if state is not None:
            closed = torch.from_numpy(self._valid[self._last, np.arange(self.n)]).to(self.device)
            for now, before in zip(tree_leaves(state["now"]), tree_leaves(state["before"])):
                before[closed] = now[closed]


def views_of(
    pool: BatchColumns, agents: Sequence[Agent], batches: Sequence[SampleBatch], device: torch.device | None = None
) -> list[Any]:
    """The views of each of a pool's groups in these batches, where the agents are or on another device."""
    kind = TurnViews if pool.takes_turns else GroupViews if pool.device is None else TensorViews
    out: list[Any] = []
    for policy, slots in pool.groups:
        agent, null = agents[policy], pool.specs[policy].null_action
        out.append(kind(batches[policy], slots, null, device or agent_device(agent), agent.noise_size))
    return out


def answer_leaves(action: Tree, info: Mapping[str, Tree]) -> Callable[[Tree, Mapping[str, Tree]], list[Any]]:
    """A function that returns `tree_leaves((action, info))` of answers of this form: most are flat, and asked for at
    every step."""
    if not is_leaf(action) or not all(map(is_leaf, info.values())):
        return lambda action, info: tree_leaves((action, info))
    keys = sorted(info)
    return lambda action, info: [action, *[info[key] for key in keys]]


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


class LoopAgent(Protocol):
    """The part of an `Agent` that the loop needs."""

    noise_size: int
    env_ranks: bool
    held_noise: HeldNoise
    evaluates_with_noise: bool

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None, /) -> tuple[Tree, dict[str, Tree], Tree]: ...


class LoopPool(Protocol):
    """The part of an `EnvPool` that the loop needs."""

    groups: tuple[Group, ...]
    seats: tuple[int, ...]
    takes_turns: bool

    def bind(self, outs: Sequence[SampleBatch]) -> None: ...
    def send(self, group: int, row: int) -> None: ...
    def recv(self) -> int: ...
    def pending(self, group: int) -> tuple[Ints, Ints]: ...
    def finished(self, group: int) -> bool: ...


def collect(
    pool: LoopPool,
    agents: Sequence[LoopAgent],
    batches: Sequence[SampleBatch],
    views: Sequence[Any],
    states: list[Tree],
    noise: Noise | None,
) -> None:
    """Fills the batches with T rows of every slot; a group is served as soon as its step before has come back.

    Args:
        agents, batches: one for each of the pool's policies.
        views: `GroupViews` for each of the pool's groups, of its policy's batch; `TurnViews` where agents take turns.
        states: recurrent state [padded, ...] of each group, replaced by the state after the batch.
        noise: the address of the uniforms to act by, or None to act deterministically.
    """
    T, by_turns = batches[0].spec.T, pool.takes_turns
    uniforms = [_uniforms(pool, noise, *each) for each in enumerate(zip(agents, batches))]
    acting = [agents[policy] for policy, _ in pool.groups]
    noises = [view.noise(uniforms[policy], slots) for view, (policy, slots) in zip(views, pool.groups)]
    if by_turns:
        for view in views:
            view.clear()
    pool.bind(batches)
    for view, state in zip(views, states):
        view.record_state(state)

    def serve_row(group: int, row: int) -> None:
        if (act := by_kernel[group]) is not None:
            act(row)
            pool.send(group, row)
            return
        view = views[group]
        action, info, states[group] = acting[group].act(view.input(row), states[group], noises[group][row])
        for out, value in zip(view.outputs[row], view.leaves(action, info)):
            out.copy_(value if view.direct else value[: view.n])
        pool.send(group, row)

    def serve_turns(group: int, sweep: int) -> None:
        slots, rows = pool.pending(group)
        if len(slots):
            views[group].act(acting[group], slots, rows, states[group], noises[group])
        pool.send(group, sweep)

    serve = serve_turns if by_turns else serve_row
    with torch.inference_mode(), one_torch_thread():
        by_kernel = [
            None if by_turns else view.served(agent, uniforms[policy])
            for view, agent, (policy, _) in zip(views, acting, pool.groups)
        ]
        rows = [0] * len(pool.groups)
        begun = [group for group in range(len(rows)) if not (by_turns and pool.finished(group))]
        for group in begun:
            serve(group, 0)
        unfinished = len(begun)
        while unfinished:
            group = pool.recv()
            views[group].null_ignored(rows[group])
            rows[group] += 1
            if pool.finished(group) if by_turns else rows[group] == T:
                unfinished -= 1
            else:
                serve(group, rows[group])
    if by_turns:
        for view, state in zip(views, states):
            view.finish(state)


@contextlib.contextmanager
def one_torch_thread() -> Generator[None, None, None]:
    """torch computes with one thread, as in workers: with more, MKL divides some products so that bits differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # 0.1 us
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _uniforms(
    pool: LoopPool, noise: Noise | None, policy: int, of: tuple[LoopAgent, SampleBatch]
) -> npt.NDArray[np.float32] | Tensor | None:
    """[T, B, noise_size] of one policy, where its batch is; None where it acts deterministically."""
    agent, batch = of
    if noise is None or (noise.purpose == Purpose.EVALUATE_GREEDILY and not agent.evaluates_with_noise):
        return None
    if noise.first_slot:  # an environment's number, as all addresses of samplers are
        noise = noise._replace(first_slot=noise.first_slot * pool.seats[policy])
    T, B = batch.spec
    how = T, B, agent.noise_size, agent.env_ranks, policy, agent.held_noise
    # numpy's on the CPU, where torch's generator takes 32 bits of a seed; on a device that is a copy to wait for.
    if isinstance(batch.valid, Tensor) and not batch.valid.is_cpu:
        return rows_on(batch.valid.device, noise, *how)
    return noise.rows(*how)


Collect: TypeAlias = Callable[
    [Any, Sequence[Any], Sequence[SampleBatch], Sequence[Any], list[Tree], "Noise | None"], None
]
"""`collect`, or a stand-in for it: (pool, agents, batches, views, states, noise)."""


class Server(Protocol):
    """Runs the loop elsewhere than in this thread: with a copy of the agent, or in the pool's workers."""

    @property
    def serve(self) -> Collect:
        """Fills the batches; arguments as in `collect`."""
        ...

    @property
    def remote(self) -> bool:
        """Agents act in the pool's workers, their recurrent states in shared memory; else states are the loop's own."""
        ...

    @property
    def device(self) -> torch.device | None:
        """Where the acting agents are; None for where their parameters are."""
        ...

    def place(
        self, pool: Any, batches: list[SampleBatch], states: Tree, agents: Sequence[Agent]
    ) -> tuple[list[SampleBatch], Tree]:
        """Moves a pool's buffers, and recurrent states of remote agents, to where all sides see them.

        Args:
            batches: one policy after the other in each buffer. states: [B, ...] for each policy, or None.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Further `sampler/...` metrics."""
        ...

    def close(self) -> None:
        """Called once after the pools are closed."""
