"""CQL: gap, targets and losses by hand and by known integrals, where its gradient points, and what plain SAC believes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.agents.distributions import squashed_sample
from penstock.algos.cql import CQL, agent_fn, loss_choices, loss_fn, postprocess_choices, postprocess_fn, replay_fn
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.datasets.episode import Episode
from penstock.datasets.reader import Dataset
from penstock.datasets.writer import DatasetWriter
from penstock.envs.spaces import env_spec

OBS = LeafSpec("box", (2,), "float32")
BOX = EnvSpec(OBS, LeafSpec("box", (1,), "float32", low=-3.0, high=3.0))
CHOICE = EnvSpec(OBS, LeafSpec("discrete", (), "int64", sizes=(3,)))
LINEAR = ps.Net(hidden=(), activation="relu")


def inputs_of(*rows: list[float]) -> Inputs:
    return Inputs(torch.tensor(rows), None, None, None)


def sample_of(cfg: CQL, N: int = 3, size: int = 1, seed: int = 0) -> TrainBatch:
    rng = torch.Generator().manual_seed(seed)
    noise = torch.rand(N, (2 + 3 * cfg.sampled_actions) * size, generator=rng).clamp(min=1e-6)
    rows = {"action": torch.tensor([[-1.5], [0.0], [6.0]])[:N], "return": torch.tensor([1.0, 2.0, 3.0])[:N],
            "discount": torch.tensor([0.9, 0.0, 0.9])[:N], "next": Inputs(torch.randn(N, 2, generator=rng), None, None, None),
            "noise": noise}  # fmt: skip
    return TrainBatch(Inputs(torch.randn(N, 2, generator=rng), None, None, None), rows, None)


def set_linear(agent: Any, of_action: float) -> None:
    """Q(s, a) = of_action * a + 0.5 for every critic."""
    weight, bias = agent.critics.stack.parameters()
    weight.data.zero_()
    weight.data[:, -1] = of_action
    bias.data.fill_(0.5)


def processed(agent: Any, x: TrainBatch, cfg: CQL) -> TrainBatch:
    with torch.no_grad():
        return postprocess_fn(agent, x, cfg)


@pytest.mark.parametrize("slope", [0.0, 1.5, -4.0])
def test_the_gap_of_a_linear_q_is_the_known_integral(slope: float) -> None:
    """log of the integral of exp(w a + b) over [-1, 1] is log(2 sinh(w) / w) + b, less Q of the data's action."""
    cfg = CQL(sampled_actions=4000, net=LINEAR)
    agent: Any = agent_fn(BOX, cfg)
    set_linear(agent, slope)
    metrics = loss_fn(agent, processed(agent, sample_of(cfg), cfg), cfg).metrics
    whole = math.log(2 * math.sinh(slope) / slope) if slope else math.log(2)
    taken = (-0.5 + 0.0 + 1.0) / 3  # of [-3, 3], and the last one is clipped
    assert metrics["gap"].item() == pytest.approx(whole - slope * taken, abs=0.05)


def test_losses_by_hand() -> None:
    """Every proposed action by a loop: three distributions, each with its own density."""
    cfg = CQL(sampled_actions=2, cql_alpha=0.7, net=ps.Net(hidden=(8,), activation="relu"))
    agent: Any = agent_fn(BOX, cfg)
    raw = sample_of(cfg)
    x = processed(agent, raw, cfg)
    loss: Any = loss_fn(agent, x, cfg)
    normal = torch.distributions.Normal(0.0, 1.0)
    bellman, gaps = 0.0, 0.0
    for i in range(3):
        one = Inputs(raw.inputs.obs[i : i + 1], None, None, None)
        following = Inputs(raw["next"].obs[i : i + 1], None, None, None)
        u = raw["noise"][i].tolist()
        action, _ = squashed_sample(agent(following), normal.icdf(torch.tensor([[u[1]]])))
        target = raw["return"][i] + raw["discount"][i] * agent.target_q(following, action).min()
        proposals = [(torch.tensor([[2 * v - 1]]), -math.log(2.0)) for v in u[2:4]]
        for out, vs in ((agent(one), u[4:6]), (agent(following), u[6:8])):
            drawn = [squashed_sample(out, normal.icdf(torch.tensor([[v]]))) for v in vs]
            proposals += [(a, logp.item()) for a, logp in drawn]
        taken = (raw["action"][i : i + 1] / 3).clamp(-1, 1)
        for k in range(2):
            q = agent.q(one, taken)[k].item()
            bellman += 0.5 * (q - target.item()) ** 2 / 3
            weighed = [math.exp(agent.q(one, a)[k].item() - logp) for a, logp in proposals]
            gaps += (math.log(sum(weighed) / 6) - q) / 3
    assert loss.total["critic"].item() == pytest.approx(bellman + 0.7 * gaps, rel=1e-4)
    assert loss.metrics["critic_loss"].item() == pytest.approx(bellman, rel=1e-4)
    assert loss.metrics["gap"].item() == pytest.approx(gaps / 2, rel=1e-4)
    assert loss.total.keys() == {"critic", "actor", "alpha"}


def test_the_gradient_pushes_unseen_actions_down() -> None:
    """While targets hold Q of the data's action where it is."""
    cfg = CQL(sampled_actions=10, lr=1e-2, net=ps.Net(hidden=(32,), activation="relu"))
    policy = cfg.build(BOX, seed=1)
    agent: Any = policy.agent
    raw, grid = sample_of(cfg), torch.linspace(-1, 1, 21).unsqueeze(1)

    def of(action: Tensor) -> float:
        """Mean Q of an action in the first row's state."""
        with torch.no_grad():
            return agent.q(Inputs(raw.inputs.obs[:1].expand(len(action), -1), None, None, None), action).mean().item()

    with torch.no_grad():
        target = agent.q(raw.inputs, agent.box.to_unit(raw["action"])).mean(0)
    before = of(grid), of(torch.full((1, 1), -0.5))
    for _ in range(30):
        x = processed(agent, raw, cfg)
        policy.learn_on_batch(TrainBatch(x.inputs, {**x.rows, "target": target}, None))
    assert of(grid) < before[0] - 0.1
    assert of(torch.full((1, 1), -0.5)) > before[1]


def test_targets_and_their_entropy() -> None:
    cfg = CQL(alpha=0.5, sampled_actions=1)
    agent: Any = agent_fn(BOX, cfg)
    agent.set_exploration(cfg, cfg.learning_starts)
    x = sample_of(cfg)
    plain, soft = (
        processed(agent, x, CQL(alpha=0.5, sampled_actions=1, entropy_backup=on))["target"] for on in (False, True)
    )
    _, logp = squashed_sample(agent(x["next"]), torch.distributions.Normal(0.0, 1.0).icdf(x["noise"][:, 1:2]))
    torch.testing.assert_close(soft, plain - x["discount"] * 0.5 * logp, rtol=1e-4, atol=1e-4)
    assert plain[1].item() == 2.0  # a terminal state


class Fixed:
    """Gives Q of choices from tables; of one state action 2 is forbidden."""

    online = (1.0, 2.0, 0.0), (0.0, 0.0, 5.0)
    target = (10.0, 20.0, 30.0), (1.0, 2.0, 3.0)

    def __init__(self) -> None:
        self.q = torch.tensor(self.online, dtype=torch.float64, requires_grad=True)

    def __call__(self, inputs: Any) -> Tensor:
        return self.q

    def bootstrap(self, inputs: Any) -> Tensor:
        return torch.tensor(self.target, dtype=torch.float64)

    def legal(self, inputs: Any, q: Tensor) -> Tensor:
        return q.masked_fill(torch.tensor([[False] * 3, [False, False, True]]), -1e9)

    def greedy(self, inputs: Any, q: Tensor) -> Tensor:
        return self.legal(inputs, q).argmax(-1)

    def index(self, action: Tensor) -> Tensor:
        return action

    def scaled_reward(self, reward: Tensor) -> Tensor:
        return reward

    def unless_stuck(self, inputs: Any, x: Tensor) -> Tensor:
        return x


def test_choices_by_hand() -> None:
    agent: Any = Fixed()
    rows = {"action": torch.tensor([0, 1]), "return": torch.tensor([1.0, 1.0], dtype=torch.float64),
            "discount": torch.tensor([0.5, 0.5], dtype=torch.float64), "next": None}  # fmt: skip
    cfg = CQL(cql_alpha=2.0)
    x = postprocess_choices(agent, TrainBatch(inputs_of([0.0]), rows, None), cfg)
    assert x["target"].tolist() == [1 + 0.5 * 20, 1 + 0.5 * 1]  # the online network chose 1, and 0
    loss: Any = loss_choices(agent, x, cfg)
    gaps = [math.log(math.e + math.e**2 + 1) - 1.0, math.log(2.0) - 0.0]
    bellman = 0.5 * ((1 - 11) ** 2 + (0 - 1.5) ** 2) / 2
    assert loss.total["critic"].item() == pytest.approx(bellman + 2.0 * sum(gaps) / 2)
    assert loss.priorities.tolist() == [10.0, 1.5]
    (gradient,) = torch.autograd.grad(loss.total["critic"], [agent.q])
    share = torch.tensor(Fixed.online[0], dtype=torch.float64).softmax(0)
    expected = torch.stack([share * 2 / 2, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64) * 2 / 2])
    expected[0, 0] += -1.0 + (1 - 11) / 2
    expected[1, 1] += -1.0 + (0 - 1.5) / 2
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("spec", [BOX, CHOICE])
def test_the_multiplier_rises_above_the_threshold_and_falls_below_it(spec: EnvSpec) -> None:
    for threshold, rises in ((-5.0, True), (50.0, False)):
        cfg = CQL(cql_alpha=2.0, threshold=threshold, lr=0.1)
        policy = cfg.build(spec)
        agent: Any = policy.agent
        assert agent.log_multiplier.item() == pytest.approx(math.log(2.0))
        x = sample_of(cfg)
        if spec is CHOICE:
            rows = {**x.rows, "action": torch.tensor([0, 1, 2])}
            x = TrainBatch(x.inputs, rows, None)
        with torch.no_grad():
            x = policy.postprocess(x)  # pyright: ignore[reportArgumentType]
        loss = policy.learn_on_batch(x)
        assert loss is not None
        assert loss.metrics["multiplier"].item() == pytest.approx(2.0)
        assert (agent.log_multiplier.item() > math.log(2.0)) == rises
        assert "log_multiplier" in policy.state_dict()["agent"]


def test_a_step_is_a_function_of_its_noise() -> None:
    cfg = CQL(sampled_actions=3)
    agent: Any = agent_fn(BOX, cfg)
    assert replay_fn(agent, cfg).noise_size == 2 + 3 * 3
    state = torch.get_rng_state()
    one, two = (loss_fn(agent, processed(agent, sample_of(cfg, seed=5), cfg), cfg).total for _ in range(2))
    assert isinstance(one, dict) and isinstance(two, dict)
    assert all(one[name].item() == two[name].item() for name in one)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("settings", "message"), [
    ({"cql_alpha": -1.0}, "cql_alpha=-1.0"), ({"cql_alpha": 0.0, "threshold": 1.0}, "more than 0 with a threshold"),
    ({"sampled_actions": 0}, "sampled_actions=0"), ({"lr": 0.0}, "lr=0.0"), ({"tau": 0.0}, "tau=0.0"), ({"alpha": 0.0}, "alpha=0.0"),
    ({"net": ps.Net(recurrent="lstm")}, "BC and MARWIL learn with memory"),
])  # fmt: skip
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CQL(**settings)


def test_other_actions_are_refused_by_name() -> None:
    spec = EnvSpec(OBS, LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 3), start=(0, 0)))
    with pytest.raises(ConfigError, match=r"CQL needs a box or one discrete action.*use MARWIL"):
        CQL().build(spec)
    with pytest.raises(ConfigError, match="CQL needs finite action bounds"):
        CQL().build(EnvSpec(OBS, LeafSpec("box", (1,), "float32", low=-math.inf, high=math.inf)))


class Cliff(gym.Env[Any, Any]):
    """One step that pays ten times the action in [-1, 1] up to 0.4, and beyond it -10."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,))
    action_space = gym.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        a = float(action[0])
        return np.zeros(1, np.float32), 10.0 * a if abs(a) <= 0.4 else -10.0, True, False, {}


def cliff_data(folder: Path) -> str:
    """Nobody has ever gone beyond 0.3."""
    live, rng = Cliff(), np.random.default_rng(0)
    with DatasetWriter(folder / "d", env_spec(live)) as writer:
        for _ in range(256):
            obs, _ = live.reset()
            action = rng.uniform(-0.3, 0.3, 1).astype(np.float32)
            after, reward, terminated, truncated, _ = live.step(action)
            writer.append(Episode(np.stack([obs, after]), action[None], np.float32([reward]), terminated, truncated))
    return str(folder / "d")


@pytest.mark.slow
def test_it_stays_where_the_data_is_and_sac_does_not(tmp_path: Path) -> None:
    """Both extrapolate that more pays more; only SAC believes it, and falls."""
    shared: Any = {"lr": 3e-3, "batch_size": 64, "replay_ratio": 64.0, "learning_starts": 64, "alpha": 0.05,
                   "net": ps.Net(hidden=(32,), activation="relu")}  # fmt: skip
    path, found = cliff_data(tmp_path), dict[str, tuple[float, float]]()
    for name, algo in (("sac", ps.SAC(**shared)), ("cql", CQL(actor_lr=None, sampled_actions=4, **shared))):
        sampler = ps.OfflineSampler(path, T=16, B=4).build(Cliff, 1)
        policy = algo.build(sampler.spec, seed=1)
        sampler.initialize(policy.agent)
        for itr in range(12):
            ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
        agent: Any = policy.agent
        one = inputs_of([0.0])
        with torch.no_grad():
            believed = agent.smallest_q(one, torch.tanh(agent(one)[:, :1])).item()
        found[name] = believed, sampler.evaluate_agent(0, 2).mean_return
        sampler.shutdown()
    assert found["sac"][1] == -10.0
    assert found["sac"][0] > 4.0
    assert found["cql"][1] > 1.0
    assert found["cql"][0] < found["cql"][1] + 0.5


def test_all_of_the_dataset_is_in_reach_from_the_first_gradient_step(tmp_path: Path) -> None:
    """The first steps of a run that is far shorter than the data; a replay too small for it says so."""
    path = cliff_data(tmp_path)
    steps = int(Dataset(Path(path)).lengths.sum())
    assert steps == 256

    def sizes(name: str, capacity: int) -> list[float]:
        algo = ps.override(CQL(batch_size=16, replay_ratio=1.0, learning_starts=0, sampled_actions=2,
                               net=ps.Net(hidden=(8,), activation="relu")), {"replay.capacity": capacity})  # fmt: skip
        run = ps.RunConfig(steps=128, dir=str(tmp_path / name), eval_episodes=0, log_interval=1, progress="off")
        with ps.Run(ps.Experiment(Cliff, algo, ps.OfflineSampler(path, T=8, B=4), run)) as live:
            return [it.metrics["replay/size"] for it in live]

    whole = sizes("whole", steps)
    assert whole == [steps] * len(whole)
    with pytest.warns(UserWarning, match=f"dataset of {steps:,} steps.*--algo.replay.capacity {steps}"):
        assert sizes("short", steps - 1)[0] < 64


@pytest.mark.slow
def test_a_resumed_run_is_the_run_wherever_samples_are_read(tmp_path: Path) -> None:
    path = cliff_data(tmp_path)

    def exp(name: str, steps: int, prefetch: bool) -> ps.Experiment:
        run = ps.RunConfig(steps=steps, dir=str(tmp_path / name), eval_episodes=1, progress="off", learner_threads=1)
        algo = ps.override(CQL(threshold=1.0, batch_size=16, replay_ratio=8.0, learning_starts=32, sampled_actions=2,
                               net=ps.Net(hidden=(8,), activation="relu")), {"replay.prefetch": prefetch})  # fmt: skip
        return ps.Experiment(Cliff, algo, ps.OfflineSampler(path, T=8, B=4), run)

    ps.train(exp("whole", 300, False))
    ps.train(exp("threaded", 300, True))
    ps.train(exp("cut", 100, False))
    ps.resume(tmp_path / "cut", {"run.steps": 300}, env=Cliff)
    whole, threaded, cut = (ps.load(tmp_path / name).agent.state_dict() for name in ("whole", "threaded", "cut"))
    assert all(torch.equal(whole[name], threaded[name]) and torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.slow
def test_two_learners_have_the_whole_dataset_as_one_has(tmp_path: Path) -> None:
    path = cliff_data(tmp_path)
    found: list[tuple[float, dict[str, Tensor]]] = []
    for learners in (1, 2):
        algo = CQL(batch_size=16, replay_ratio=8.0, learning_starts=32, sampled_actions=2,
                   net=ps.Net(hidden=(8,), activation="relu"))  # fmt: skip
        run = ps.RunConfig(steps=200, dir=str(tmp_path / str(learners)), learners=learners, eval_episodes=0,
                           progress="off")  # fmt: skip
        result = ps.train(ps.Experiment("tests.algos.test_cql:Cliff", algo, ps.OfflineSampler(path, T=8, B=4), run))
        found.append((result.metrics["replay/size"], ps.load(tmp_path / str(learners)).agent.state_dict()))
    (size, one), (other_size, other) = found
    assert size == other_size == 256
    for name, x in one.items():
        torch.testing.assert_close(x, other[name], rtol=0.0, atol=1e-6)
