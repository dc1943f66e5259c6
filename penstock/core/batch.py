"""The record: batches, which every sampler fills and every algorithm trains on.

Dimension letters, here and everywhere: T time steps, B slots (environment instances times agents per instance),
N flat samples, A actions, L sequence length, K agents, *O and *A the trailing shapes of observation and action.

A row t is one environment step of one slot: `action[t]` was chosen at `obs[t]`; `reward[t]`, `terminated[t]` and
`truncated[t]` answer it; `obs[t+1]` is its true successor wherever `valid[t]`. The step after an end is a reset row:
its action is ignored, it is not valid, and the observation after it is `first`. Hence three rules for every batch: a
step goes on only in a valid row; row 0 of a batch is row T of the one before; only valid rows are environment steps.

One kind of batch has no reset rows, that of environments which reset in the step of an end (batched simulators): there
`obs[t+1]` opens the next episode where `resets[t]`, and the true successor of row t is `final[t]`.
"""

from __future__ import annotations

import math
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from penstock.core.errors import ConfigError, nearest
from penstock.core.spec import BatchSpec, EnvSpec, allocate
from penstock.core.tree import Tree, struct, tree_assign, tree_leaves, tree_map, tree_paths

Array = Any
"""A numpy array or torch tensor."""


class Inputs(NamedTuple):
    """The inputs of an agent at one step ([B, ...]) or over a batch ([T+1, B, ...])."""

    obs: Tree
    prev_action: Tree
    """The action that led to `obs`; null where `first`."""
    prev_reward: Array
    """float32 reward that came with `obs`; 0 where `first`."""
    first: Array
    """bool, `obs` opens an episode: recurrent state, previous action and reward count as null."""
    idle: Array | None = None
    """bool, no turn was taken here and the episode goes on: recurrent state passes over the row. None: nowhere."""

    def flat(self) -> Inputs:
        """[T, B, ...] as [T * B, ...]."""
        return Inputs(*(tree_map(flattened, part) for part in self))

    def split(self, rows: int) -> Iterator[Inputs]:
        """Views of flat inputs, `rows` at a time; of the last part the rest."""
        for start in range(0, len(self.first), rows):
            yield Inputs(*(tree_map(lambda x, at=start: x[at : at + rows], part) for part in self))


def flattened(x: Array) -> Array:
    """[T, B, ...] as [T * B, ...], also of arrays without elements."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


@struct
class SampleBatch:
    """T steps of B slots. A view of live buffers, valid until the next `obtain_samples`; `copy()` keeps it."""

    obs: Tree
    """[T+1, B, *O], in the environment's dtypes."""
    first: Array
    """[T+1, B] bool."""
    prev_action: Tree
    """[T+1, B, *A] as the environment takes it (boxes before clipping to their bounds). Rows 1.. are `action`."""
    prev_reward: Array
    """[T+1, B] float32, undiscounted and unclipped. Rows 1.. are `reward`."""
    terminated: Array
    """[T, B] bool, the episode ended in a terminal state: bootstrap with 0."""
    truncated: Array
    """[T, B] bool, the episode was cut short: bootstrap with V(obs[t+1])."""
    valid: Array
    """[T, B] bool. False: a reset row, an idle or absent slot, or a row lost to a fault."""
    info: Tree
    """[T, B, ...] recorded by the agent (`logp`, ...); `env` holds the info keys that the config names."""
    state: Tree
    """[B, ...] recurrent state before row 0; None for a memoryless agent."""
    version: Array
    """[T, B] int64, the parameter version that chose the action."""
    final: Tree = None
    """[T, B, *O] the last observation of an episode where `resets`, of environments that reset in the step of an end;
    of all others None."""

    @property
    def resets(self) -> Array:
        """[T, B] bool: the environment has reset within row t, so that its true successor is `final[t]`."""
        return self.valid & self.first[1:]

    @property
    def action(self) -> Tree:
        """[T, B, *A], a view of `prev_action`."""
        return tree_map(lambda x: x[1:], self.prev_action)

    @property
    def reward(self) -> Array:
        """[T, B] float32, a view of `prev_reward`."""
        return self.prev_reward[1:]

    @property
    def inputs(self) -> Inputs:
        """[T+1, B, ...] views of the agent's inputs; row T is its next input."""
        return Inputs(self.obs, self.prev_action, self.prev_reward, self.first)

    @property
    def inputs_t(self) -> Inputs:
        """[T, B, ...] views of the inputs at which the agent chose `action`."""
        return Inputs(*(tree_map(lambda x: x[:-1], part) for part in self.inputs))

    @property
    def spec(self) -> BatchSpec:
        """T and B of this batch."""
        T, B = self.valid.shape
        return BatchSpec(T, B)

    def __repr__(self) -> str:
        """T, B, how many rows are valid, and shapes and dtypes of what differs between environments and agents."""
        own = {name: getattr(self, name) for name in ("obs", "prev_action", "info", "state")}
        return f"SampleBatch({', '.join([*_size(self.valid), *_arrays(own)])})"

    @property
    def env_steps(self) -> int:
        """Environment steps in the batch: its valid rows."""
        return int(np.count_nonzero(self.valid) if isinstance(self.valid, np.ndarray) else self.valid.sum())

    @property
    def agent_steps(self) -> int:
        """The same: of one policy every valid row is a step of one agent."""
        return self.env_steps

    def terminal(self, key: str = "") -> Array:
        """[T, B] bool: terminated, or marked by a positive `info["env"][key]`, as `penstock.Net.terminal_info` says."""
        if not key:
            return self.terminated
        if key not in self.info.get("env", {}):
            raise ConfigError(f"net.terminal_info={key!r} is not recorded; add it to info_keys (--info-keys {key})")
        return self.terminated | (self.info["env"][key] > 0)  # NaN, where it was not reported, is not

    def copy(self) -> SampleBatch:
        """A batch that owns its memory."""
        return tree_map(lambda x: x.copy() if isinstance(x, np.ndarray) else x.clone(), self)

    def flatten(self) -> dict[str, Tree]:
        """The rows as flat samples [N, ...] with N = T * B, time-major; row T and the state are dropped."""
        T, B = self.spec

        def flat(x: Array) -> Array:
            return x[:T].reshape(T * B, *x.shape[2:])

        names = [x for x in ROWS_AND_NEXT + ROWS if x != "final" or self.final is not None]
        out = {name: tree_map(flat, getattr(self, name)) for name in names}
        return out | {"action": tree_map(flat, self.action), "reward": flat(self.reward)}

    def __getitem__(self, index: slice | tuple[slice, slice]) -> SampleBatch:
        """Views of some steps and slots: `batch[t0:t1]` or `batch[t0:t1, b0:b1]`; row t1 of the T+1 leaves stays.

        The state is kept if it is known at t0, that is for t0 = 0, and None otherwise.
        """
        if isinstance(index, str):
            names = [*self.__dataclass_fields__, "action", "reward", "inputs", "inputs_t"]
            raise ConfigError(
                f"SampleBatch[{index!r}]; its arrays are attributes, e.g. batch.reward, and info has what the agent "
                f"recorded; {nearest(index, names)}"
            )
        time, slots = index if isinstance(index, tuple) and len(index) == 2 else (index, slice(None))
        T, B = self.spec
        t0, t1 = _bounds(time, T, "time")
        b0, b1 = _bounds(slots, B, "slot")

        def rows(x: Array) -> Array:
            return x[t0:t1, b0:b1]

        def rows_and_next(x: Array) -> Array:
            return x[t0 : t1 + 1, b0:b1]

        return SampleBatch(
            obs=tree_map(rows_and_next, self.obs),
            first=rows_and_next(self.first),
            prev_action=tree_map(rows_and_next, self.prev_action),
            prev_reward=rows_and_next(self.prev_reward),
            terminated=rows(self.terminated),
            truncated=rows(self.truncated),
            valid=rows(self.valid),
            info=tree_map(rows, self.info),
            state=tree_map(lambda x: x[b0:b1], self.state) if t0 == 0 else None,
            version=rows(self.version),
            final=tree_map(rows, self.final),
        )


ROW_MULTIPLE = 4
"""Rows of every acting forward are padded to a multiple of it."""
ROWS_AND_NEXT = ("obs", "first", "prev_action", "prev_reward")
ROWS = ("terminated", "truncated", "valid", "info", "version", "final")


@struct
class TrainBatch:
    """Rows that are trained on: a post-processed batch, a minibatch of one, or a sample of replay.

    After `postprocess_fn` leaves are [T, B, ...]. A minibatch of a memoryless agent is [N, ...], valid rows only; of
    a recurrent one [T, b, ...], whole columns with a mask. A sample of replay is [N, ...], or [L, N, ...] of sequences.
    """

    inputs: Inputs
    """Inputs of the agent; the loss calls `agent(x.inputs, x.state)`."""
    rows: Mapping[str, Tree]
    """Arrays of the algorithm, or of the replay's view, by name; `x["advantage"]` reads one."""
    valid: Array | None = None
    """bool mask over rows; None if all are valid."""
    state: Tree = None
    """[B, ...] recurrent state before row 0."""
    metrics: Mapping[str, Array] | None = None
    """Scalars about the whole batch to log; minibatches and samples have none."""

    def __repr__(self) -> str:
        """How many rows are valid, shapes and dtypes, and the names of the metrics."""
        own = {**self.inputs._asdict(), **self.rows, "state": self.state}
        said = [*([] if self.valid is None else _size(self.valid)), *_arrays(own)]
        metrics = [f"metrics: {', '.join(self.metrics)}"] if self.metrics else []
        return f"TrainBatch({', '.join([*said, *metrics])})"

    def __getitem__(self, name: str) -> Tree:
        try:
            return self.rows[name]
        except KeyError:
            raise ConfigError(f"no row {name!r} in this TrainBatch; {nearest(name, self.rows)}") from None


@dataclass(frozen=True, repr=False)
class MultiAgentBatch:
    """One SampleBatch for each policy id; of environments of many agents these are the sampler's buffers themselves."""

    policy_batches: Mapping[str, SampleBatch]
    env_steps: int
    """Steps of environments, however many agents acted in each; of turn-based ones their moves."""
    environments: int | None = None
    """E, where row t of every policy is the same step of each of E environments; None where agents take turns."""

    @property
    def agent_steps(self) -> int:
        """Valid rows over all policies."""
        return sum(batch.env_steps for batch in self.policy_batches.values())

    def __getitem__(self, policy: str) -> SampleBatch:
        try:
            return self.policy_batches[policy]
        except TypeError:  # a slice or an array
            first = next(iter(self.policy_batches))
            raise ConfigError(
                f"MultiAgentBatch[{policy!r}]; expected a policy id, whose batch has rows: batch[{first!r}][0:3]"
            ) from None
        except KeyError:
            raise ConfigError(
                f"no policy {policy!r} in this MultiAgentBatch; {nearest(policy, self.policy_batches)}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.policy_batches)

    def __contains__(self, policy: object) -> bool:
        return policy in self.policy_batches

    def __len__(self) -> int:
        """`env_steps`, as RLlib counts."""
        return self.env_steps

    def keys(self) -> KeysView[str]:
        """The policy ids."""
        return self.policy_batches.keys()

    def items(self) -> ItemsView[str, SampleBatch]:
        """Policy ids and their batches."""
        return self.policy_batches.items()

    def values(self) -> ValuesView[SampleBatch]:
        """The batches."""
        return self.policy_batches.values()

    def __repr__(self) -> str:
        batches = ", ".join(f"{name!r}: {batch!r}" for name, batch in self.items())
        return f"MultiAgentBatch({self.env_steps:,} env steps, {{{batches}}})"

    def copy(self) -> MultiAgentBatch:
        """A batch that owns its memory."""
        batches = {name: batch.copy() for name, batch in self.items()}
        return MultiAgentBatch(batches, self.env_steps, self.environments)


AnyBatch: TypeAlias = Any
"""A SampleBatch, or a MultiAgentBatch where environments have many agents."""


def batches_of(batch: AnyBatch) -> Mapping[str, SampleBatch]:
    """The batch of each policy by its id; a SampleBatch has the id ""."""
    return batch.policy_batches if isinstance(batch, MultiAgentBatch) else {"": batch}


def allocate_batch(
    env: EnvSpec, spec: BatchSpec, info: Tree = None, state: Tree = None, env_info: Sequence[str] = ()
) -> SampleBatch:
    """An empty batch in the shapes of `env`, its actions null.

    `info` and `state` are examples whose leaves lack the leading dimensions. `env_info` keys become float32 columns
    of NaN, which means "not reported".
    """
    T, B = spec
    columns = {key: np.full((T, B), np.nan, np.float32) for key in env_info}
    agent_info: dict[str, Tree] = tree_map(lambda x: np.zeros((T, B, *np.shape(x)), np.asarray(x).dtype), info or {})
    batch = SampleBatch(
        obs=allocate(env.obs, T + 1, B),
        first=np.zeros((T + 1, B), bool),
        prev_action=allocate(env.action, T + 1, B),
        prev_reward=np.zeros((T + 1, B), np.float32),
        terminated=np.zeros((T, B), bool),
        truncated=np.zeros((T, B), bool),
        valid=np.zeros((T, B), bool),
        info=agent_info | ({"env": columns} if columns else {}),
        state=tree_map(lambda x: np.zeros((B, *np.shape(x)), np.asarray(x).dtype), state),
        version=np.zeros((T, B), np.int64),
    )
    tree_map(np.copyto, batch.prev_action, env.null_action)
    return batch


def carry_over(source: SampleBatch, out: SampleBatch) -> None:
    """Copies row T of one batch to row 0 of the next, which may be the same buffer."""
    for name in ROWS_AND_NEXT:
        tree_assign(getattr(out, name), 0, getattr(source, name), -1)


def as_arrays(tree: Tree) -> Tree:
    """The tree with numpy leaves: of tensors on the CPU views of the same memory, of others copies."""
    return tree_map(lambda x: x if isinstance(x, np.ndarray) else x.cpu().numpy(), tree)


def poison(batch: SampleBatch) -> None:
    """Fills a released buffer with values that no environment returns, so that a stale view is noticed."""
    for x in tree_leaves(batch):
        x[...] = {"f": np.nan, "b": True, "u": 213, "i": -4242 if x.itemsize > 1 else -42}[x.dtype.kind]


def padded_rows(rows: int) -> int:
    """The number of rows that an acting forward runs with: the next multiple of 4.

    Matrix products on CPU round differently for 1, 2 and 3 rows than for 4 and more, and a layer with one output
    differs at 5, 6 and 7 as well; at multiples of 4 every row comes out the same, given the mode of the library that
    `penstock/__init__.py` asks for (`penstock doctor` measures it).
    """
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _size(valid: Any) -> list[str]:
    """`T=8, B=4, 31 of 32 rows valid` for a mask [T, B]; of fewer dimensions without T and B."""
    shape = tuple(getattr(valid, "shape", ()))
    if not shape:
        return []  # a tree of something else in the form of a batch
    spec = [f"T={shape[0]}, B={shape[1]}"] if len(shape) == 2 else []
    return [*spec, f"{int(valid.sum()):,} of {math.prod(shape):,} rows valid"]


def _arrays(named: Mapping[str, Tree]) -> list[str]:
    """`obs float32[9, 4, 3]` for each array; a name that stands for several is followed by the path of each."""
    found: list[str] = []
    for name, tree in named.items():
        for path, x in zip(tree_paths(tree), tree_leaves(tree)):
            dtype = str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
            found.append(f"{name}{path} {dtype}{list(getattr(x, 'shape', ()))}")
    return found


def _bounds(index: slice, size: int, what: str) -> tuple[int, int]:
    if not isinstance(index, slice) or index.step not in (None, 1):
        raise ConfigError(
            f"SampleBatch[{index!r}]: expected a {what} slice of step 1, e.g. batch[2:5] or batch[:, 0:4]"
        )
    start, stop, _ = index.indices(size)
    return start, max(start, stop)
