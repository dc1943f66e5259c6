"""A run that learns from replay, killed and resumed, ends in the bits of one that was never stopped, replay included."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.checkpoints.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from penstock.run.playing.evaluation import evaluate_run
from penstock.run.trainer import Trainer

pytestmark = pytest.mark.timeout(300)

STEPS = 480
RUN = ps.RunConfig(
    steps=STEPS, seed=3, checkpoint_interval=80, eval_interval=200, eval_episodes=2, log_interval=1,
    progress="off",
)  # fmt: skip
SERIAL = ps.SerialSampler(T=4, B=4)
UNIFORM = ps.ReplaySettings(capacity=160)  # a ring that comes round three times
PRIORITIZED = ps.ReplaySettings(capacity=160, index="prioritized", fresh_priority="agent")
DQN = ps.DQN(learning_starts=100, batch_size=16, replay_ratio=4.0, target_interval=10, n_step=3, replay=UNIFORM,
             net=ps.Net(hidden=(16,), normalize_obs=True))  # fmt: skip
AHEAD = replace(DQN, replay=replace(PRIORITIZED, prefetch=True))
FRAMES = replace(DQN, replay=replace(UNIFORM, deduplicate_frames=True, prefetch=True, dir="?"), replay_ratio=1.0)
CONTROL: dict[str, Any] = {"learning_starts": 100, "batch_size": 16, "replay_ratio": 4.0, "net": DQN.net}
SEQUENCES = ps.R2D1(
    learning_starts=100, batch_size=4, replay_ratio=4.0, burn_in=4, train_length=8, state_interval=4, n_step=2, lr=1e-3,
    target_interval=10, replay=replace(PRIORITIZED, capacity=200), net=ps.Net(hidden=(16,), recurrent="gru", recurrent_size=8),
)  # fmt: skip
CASES = {
    "uniform": ("Pendulum-v1", ps.SAC(**CONTROL, replay=UNIFORM), SERIAL),
    "prioritized": ("CartPole-v1", replace(AHEAD, lr="linear(1e-3, 0)"), SERIAL),
    "frames in files": ("stacked_frames:Dot", FRAMES, SERIAL),
    "workers": ("CartPole-v1", AHEAD, ps.CpuSampler(T=4, B=4, workers=2)),
    "one batch ahead": ("CartPole-v1", replace(DQN, replay=PRIORITIZED), ps.AsyncSerialSampler(SERIAL, depth=1)),
    "TD3 in files": ("Pendulum-v1", ps.TD3(**CONTROL, replay=replace(PRIORITIZED, fresh_priority="max", dir="?")), SERIAL),
    "sequences": ("CartPole-v1", SEQUENCES, SERIAL),
}  # fmt: skip


def experiment(case: str, run: Path, **changes: Any) -> ps.Experiment:
    env, algo, sampler = CASES[case]
    if algo.replay.dir:
        algo = replace(algo, replay=replace(algo.replay, dir=f"{run}-replay"))
    return ps.Experiment(env, algo, sampler, replace(RUN, dir=str(run), **changes))


def steps(run: Path) -> list[int]:
    folder = run / "checkpoints"
    return sorted(int(path.name) for path in folder.glob("0*") if path.name.isdecimal()) if folder.is_dir() else []


def arrays(run: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = load_checkpoint(find_checkpoint(run, replay=True), replay=True).arrays()
    return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kill_and_resume(
    case: str, zygote: Any, ended_by: Any, same_run: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    unbroken = zygote.train(experiment(case, whole))

    def begin() -> Any:
        for folder in (run, Path(f"{run}-replay")):
            shutil.rmtree(folder, ignore_errors=True)
        return zygote.train(experiment(case, run))

    ended_by(begin, lambda: max(steps(run), default=0) > STEPS // 2, pause_s=0.01)
    assert steps(run)[-1] < STEPS
    resumed = zygote.resume(run)
    assert resumed.succeed()["env_steps"] >= STEPS
    unbroken.succeed()
    assert "cut" not in resumed.output
    same_run(whole, run)
    left, right = arrays(whole), arrays(run)
    assert left == right
    assert {"obs", "prev_action", "prev_reward", "first", "terminated", "truncated", "valid"} < set(left)
    assert ("index.mass" in left) == (CASES[case][1].replay.index == "prioritized")


PARTS = {
    "fifo": ("CartPole-v1", replace(DQN, replay_ratio=0.5, replay=replace(UNIFORM, index="fifo"))),
    "noisy atoms, priorities": ("CartPole-v1", replace(
        AHEAD, distributional="c51", noisy=True, replay=replace(AHEAD.replay, fresh_priority="max"))),
    "hindsight": ("penstock.envs.toy.goals:BitFlip", replace(
        DQN, n_step=1, net=ps.Net(hidden=(16,)),
        replay=replace(UNIFORM, hindsight=4, reward_fn="penstock.envs.toy.goals:BitFlip"))),
    "DDPG": ("Pendulum-v1", ps.DDPG(**CONTROL, replay=UNIFORM)),
    "boot DQN": ("CartPole-v1", ps.BootDQN(**CONTROL, heads=3, replay=replace(UNIFORM, index="prioritized"))),
    "discrete SAC": ("CartPole-v1", ps.DiscreteSAC(**CONTROL, replay=UNIFORM)),
    **{case: CASES[case][:2] for case in ("uniform", "frames in files", "TD3 in files", "sequences")},
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS)
def test_every_part_comes_back(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, in one process: what is drawn, learned and reported after a restore is what it was without."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    env, algo = PARTS[case]
    exps = [
        ps.Experiment(
            env, replace(algo, replay=replace(algo.replay, dir=algo.replay.dir and str(tmp_path / name))), SERIAL, RUN
        )
        for name in "ab"
    ]
    found: list[tuple[Any, ...]] = []
    with Trainer(exps[0], tmp_path) as whole, Trainer(exps[1], tmp_path) as resumed:
        for _ in range(10):
            whole.train()
        whole.save()
        resumed.restore()
        for trainer in (whole, resumed):
            metrics = [trainer.train() for _ in range(8)]
            found.append((
                [{k: x for k, x in row.items() if not k.startswith("time/")} for row in metrics],
                {k: x.tobytes() for k, x in trainer.policy.arrays().items()},
                {k: x.numpy().tobytes() for k, x in trainer.policy.agent.state_dict().items()},
                trainer.policy.updates,
            ))  # fmt: skip
    assert found[0] == found[1]
    assert found[0][-1] > (4 if case in ("fifo", "frames in files") else 20)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended after 320 steps, of which the newest two checkpoints hold their replay."""
    run = tmp_path_factory.mktemp("trained") / "run"
    return ps.train(experiment("prioritized", run, steps=320)).run_dir


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "run")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)


def test_a_flipped_bit_in_the_replay_is_named_and_the_checkpoint_before_goes_on(
    trained: Path, run: Path, same_run: Callable[[Path, Path], None]
) -> None:
    before, newest = steps(run)[-2:]
    victim = run / "checkpoints" / f"{newest:012d}" / "replay-000.npy"
    flip(victim)
    with pytest.warns(UserWarning, match=rf"{victim} is damaged: its sha256.*using .*{before:012d}"):
        ps.resume(run)
    shutil.rmtree(next((run / "checkpoints").glob(f"{newest:012d}.broken-*")))
    same_run(trained, run)
    assert arrays(trained) == arrays(run)


def test_readers_of_the_policy_do_not_read_the_replay(run: Path) -> None:
    for path in (run / "checkpoints").glob("*/replay-*.npy"):
        path.unlink()
        path.mkdir()  # whoever opens it fails
    assert ps.load(run).predict(np.zeros(4)) in (0, 1)
    assert evaluate_run(run, None, 1)[1] == steps(run)[-1]
    with pytest.raises(CheckpointError, match=r"replay-000\.npy is not a plain file.*nothing to go on from.*--init"):
        ps.resume(run, {"run.steps": 800})


@pytest.mark.parametrize(("change", "says"), [
    ({"algo.replay.capacity": 320}, r"40 rows of 4 slots; this one has 80 of 4: .*replay\.capacity and sampler\.B"),
    ({"sampler.B": 5}, r"40 rows of 4 slots; this one has 32 of 5: .*replay\.capacity and sampler\.B"),
    ({"algo.replay.index": "uniform", "algo.replay.fresh_priority": "max"}, r"replay\.index='prioritized'; this one has 'uniform'"),
    ({"algo.replay.fresh_priority": "max"}, None),
])  # fmt: skip
def test_another_replay_is_refused_and_nothing_is_lost(change: dict[str, Any], says: str | None, run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with Trainer(ps.override(experiment("prioritized", run), change), run) as trainer:
        if says is None:
            trainer.restore()  # what the agent recorded is not needed
        else:
            with pytest.raises(CheckpointError, match=says):
                trainer.restore()
            assert len(trainer.policy.replay_schedule.replay) == 0  # pyright: ignore[reportOptionalMemberAccess]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == {
        path: data for path, data in before.items() if path.name != ".lock"
    }


def test_a_checkpoint_without_its_replay_is_no_place_to_go_on_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ps.train(experiment("prioritized", run, steps=240, keep_replays=1))
    newest = find_checkpoint(run)
    older = find_checkpoint(run, str(steps(run)[-2]))
    assert ps.load(run, str(steps(run)[-2])).predict(np.zeros(4)) in (0, 1)
    flip(newest / "replay-000.npy")
    with pytest.raises(CheckpointError, match=rf"replay-000\.npy is damaged.*replay of {older} is gone.*keep_replays"):
        ps.resume(run, {"run.steps": 800})
    with (
        pytest.raises(CheckpointError, match="has nothing as index"),
        Trainer(experiment("prioritized", run)) as trainer,
    ):
        trainer.restore(load_checkpoint(older))


def test_a_resumed_run_lets_go_of_the_checkpoint_it_came_from(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its files would take their space on the disk after they are pruned, for as long as the run lasts."""
    held: list[str] = []

    def look(self: Any, *args: Any) -> Any:
        held.extend(line for line in Path("/proc/self/maps").read_text().splitlines() if "replay-" in line)
        return inner(self, *args)

    inner = Trainer.save
    monkeypatch.setattr(Trainer, "save", look)
    ps.resume(run, {"run.steps": 400})
    assert held == []


def test_another_algorithm_is_refused(run: Path) -> None:
    found = load_checkpoint(find_checkpoint(run), replay=True)
    state = {**found.state, "policy": {k: v for k, v in found.state["policy"].items() if k != "experience"}}
    with Trainer(experiment("prioritized", run)) as trainer, pytest.raises(CheckpointError, match="'experience'"):
        trainer.restore(Checkpoint(found.path, found.step, state, found.policy, found.array_files))


@pytest.mark.usefixtures("forked")
def test_stale_batches_are_for_algorithms_that_take_them(tmp_path: Path) -> None:
    ahead = ps.AsyncSerialSampler(SERIAL, depth=1)
    with pytest.raises(ConfigError, match=r"sampler\.depth=1 .*and A2C learns only from"):
        Trainer(ps.Experiment("CartPole-v1", ps.A2C(), ahead))
    with Trainer(ps.Experiment("CartPole-v1", DQN, ahead)) as trainer:
        trainer.train()
