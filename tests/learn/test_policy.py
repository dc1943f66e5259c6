import io
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.agents.agent import Agent
from penstock.agents.networks import Net
from penstock.algos.ppo import PPO
from penstock.algos.sac import SAC
from penstock.algos.td3 import TD3
from penstock.core.batch import Inputs, SampleBatch, TrainBatch
from penstock.core.errors import CheckpointError, ConfigError, NonFiniteError
from penstock.core.schedule import Schedule
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves
from penstock.envs.toy import RepeatPrevious, ThreeStep
from penstock.learn.algorithm import Loss
from penstock.learn.policy import Policy
from penstock.learn.train_ops import train_one_step
from penstock.samplers.serial import SerialSampler

VECTOR = LeafSpec("box", (3,), "float32")
CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,), start=2)
CHOICES = LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 3), start=(0, 5))
BOX = LeafSpec("box", (2,), "float32", low=-3.0, high=(5.0, 1.0))
SCALAR = LeafSpec("box", (), "float64", -2.0, 2.0)
NESTED = {"a": VECTOR, "b": CHOICE}


class Line(Agent):
    """One weight and an idle action: what a Policy needs, and nothing else."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.spec, self.noise_size = spec, 1
        self.weight = nn.Parameter(torch.rand(1))
        self.bias = nn.Parameter(torch.rand(1))

    def forward(self, inputs: Inputs, state: Any = None) -> Tensor:
        return self.weight * inputs.obs + self.bias

    def act(self, inputs: Inputs, state: Any, noise: Any) -> Any:
        return torch.zeros(len(inputs.first), dtype=torch.int64), {}, None


@dataclass(frozen=True)
class LineSettings:
    lr: Schedule = 0.5
    coef: Schedule = "linear(2, 0)"


def line_loss(agent: Line, x: TrainBatch, cfg: LineSettings) -> Loss:
    total = (agent(x.inputs) * x["scale"]).sum()
    return Loss(total, {"total": total.detach(), "coef": torch.tensor(float(cfg.coef))})


def sgd(agent: Agent, cfg: Any) -> dict[str, torch.optim.Optimizer]:
    groups = [{"params": [agent.weight]}, {"params": [agent.bias], "lr_scale": 0.1}]
    return {"all": torch.optim.SGD(groups, lr=cfg.lr)}


def line_policy(**changes: Any) -> Policy:
    parts: dict[str, Any] = {
        "agent_fn": lambda spec, cfg: Line(spec),
        "postprocess_fn": lambda agent, batch, cfg: None,
        "loss_fn": line_loss,
        "optimizer_fn": sgd,
    }
    settings = changes.pop("settings", LineSettings())
    return Policy(settings, EnvSpec(VECTOR, CHOICE), **{**parts, **changes})


def line_batch(scale: float = 1.0) -> TrainBatch:
    x = torch.tensor([2.0])
    return TrainBatch(Inputs(x, None, None, None), {"scale": torch.tensor([scale])}, None)


def ppo_policy(obs: Any, action: Any, seed: int = 0, **net: Any) -> Policy:
    return PPO(net=Net(**{"hidden": (16,), **net})).build(EnvSpec(obs, action), seed)


def test_one_total_steps_the_optimizer_all_alone():
    """Of another optimizer an old gradient may be left, from a loss that had a total for it."""

    def apart(agent: Any, cfg: Any) -> Any:
        return {"all": torch.optim.SGD([agent.weight], lr=0.1), "other": torch.optim.SGD([agent.bias], lr=0.1)}

    policy = line_policy(optimizer_fn=apart)
    agent: Any = policy.agent
    before = agent.weight.item(), agent.bias.item()
    agent.bias.grad = torch.ones(1)
    policy.learn_on_batch(line_batch())
    assert agent.weight.item() != before[0] and agent.bias.item() == before[1]


# --- building


def test_parameters_are_a_function_of_the_seed_alone():
    def parameters(seed: int) -> list[Tensor]:
        return list(ppo_policy(VECTOR, CHOICE, seed).agent.parameters())

    before = torch.random.get_rng_state()
    first = parameters(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)
    assert all(torch.equal(a, b) for a, b in zip(first, parameters(1)))
    assert not all(torch.equal(a, b) for a, b in zip(first, parameters(2)))


def test_what_is_no_agent_is_refused():
    class Forgetful(Agent):
        pass

    with pytest.raises(ConfigError, match=r"agent_fn returned Linear; expected a penstock.Agent; see docs/"):
        line_policy(agent_fn=lambda spec, cfg: nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"Forgetful has no \w+.*which Agent asks for; see docs/"):
        line_policy(agent_fn=lambda spec, cfg: Forgetful())
    with pytest.raises(ConfigError, match="not understood"):
        line_policy(settings=LineSettings(lr="lin(1, 0)"))


def test_an_agent_without_parameters_is_refused():
    class Empty(Agent):
        noise_size, spec = 0, EnvSpec(VECTOR, CHOICE)

        def act(self, inputs: Any, state: Any, noise: Any) -> Any: ...
        def forward(self, inputs: Any, state: Any = None) -> Any: ...

    with pytest.raises(ConfigError, match="Empty has no trainable parameters"):
        PPO(agent=lambda spec, cfg: Empty()).build(EnvSpec(VECTOR, CHOICE))


def test_an_agent_says_what_it_must_define():
    agent = Agent()
    with pytest.raises(NotImplementedError, match="Agent must define act"):
        agent.act(None, None, None)  # pyright: ignore
    with pytest.raises(NotImplementedError, match="Agent must define forward"):
        agent(None)
    assert agent.initial_state(3) is None
    assert not agent.needs_statistics
    assert agent.scaled_reward(agent) is agent  # pyright: ignore


# --- learning


def test_one_gradient_step():
    policy = line_policy()
    weight, bias = policy.agent.weight.item(), policy.agent.bias.item()  # pyright: ignore
    policy.set_progress(0.0)
    loss = policy.learn_on_batch(line_batch())
    assert loss is not None
    metrics = loss.metrics
    assert metrics["total"].item() == pytest.approx(2 * weight + bias)
    assert not metrics["total"].requires_grad
    assert policy.agent.weight.item() == pytest.approx(weight - 0.5 * 2)  # pyright: ignore
    assert policy.agent.bias.item() == pytest.approx(bias - 0.5 * 0.1)  # pyright: ignore
    assert (policy.updates, policy.version, policy.skipped) == (1, 0, 0)


def test_the_norm_is_limited():
    policy = line_policy(max_grad_norm=0.5)
    weight = policy.agent.weight.item()  # pyright: ignore
    policy.learn_on_batch(line_batch(1000.0))
    assert policy.agent.weight.item() == pytest.approx(weight - 0.5 * 0.5 * 2 / math.sqrt(5), rel=1e-5)  # pyright: ignore


def test_schedules_follow_progress():
    policy = line_policy(settings=LineSettings(lr="linear(1, 0)"))
    groups = policy.optimizers["all"].param_groups
    assert policy.settings.coef == 2
    for progress, lr, coef in ((0.0, 1.0, 2.0), (0.25, 0.75, 1.5), (1.0, 0.0, 0.0)):
        policy.set_progress(progress)
        assert [g["lr"] for g in groups] == pytest.approx([lr, 0.1 * lr])
        assert policy.settings == LineSettings(lr, coef)
        loss = policy.learn_on_batch(line_batch())
        assert loss is not None and loss.metrics["coef"].item() == coef
    constant = line_policy()
    constant.set_progress(0.5)
    assert constant.optimizers["all"].param_groups[0]["lr"] == 0.5


def test_updates_that_are_not_finite_are_skipped_and_counted():
    policy = line_policy()
    before = [p.clone() for p in policy.agent.parameters()]
    for i in range(9):
        assert policy.learn_on_batch(line_batch(math.nan if i % 2 else math.inf)) is None
    assert all(torch.equal(a, b) for a, b in zip(before, policy.agent.parameters()))
    assert (policy.updates, policy.skipped) == (0, 9)
    assert policy.learn_on_batch(line_batch()) is not None
    assert (policy.updates, policy.skipped) == (1, 9)
    for _ in range(9):  # the count in a row began anew
        policy.learn_on_batch(line_batch(math.nan))
    with pytest.raises(NonFiniteError, match=r"10 updates in a row \(norm nan\); the last that counted was number 1"):
        policy.learn_on_batch(line_batch(math.nan))
    assert policy.skipped == 19
    assert all(torch.isfinite(p).all() for p in policy.agent.parameters())


def test_a_loss_that_is_not_finite_is_skipped_too():
    def loss(agent: Line, x: TrainBatch, cfg: Any) -> Loss:
        return Loss(agent.weight.sum() + math.nan, {})

    policy = line_policy(loss_fn=loss)
    before = policy.agent.weight.item()  # pyright: ignore
    assert policy.learn_on_batch(line_batch()) is None
    assert policy.agent.weight.item() == before  # pyright: ignore
    assert (policy.updates, policy.skipped) == (0, 1)


def test_minibatches_are_shuffled_by_seed_and_version():
    def order(seed: int, version: int) -> list[int]:
        policy = line_policy(seed=seed)
        policy.version = version
        return policy.shuffler().permutation(100).tolist()

    orders = [order(s, v) for s, v in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len({tuple(o) for o in orders}) == 4
    assert order(1, 1) == orders[3]


# --- predict


def obs_of(spec: Any, n: int | None, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    lead = () if n is None else (n,)
    if isinstance(spec, dict):
        return {k: obs_of(v, n, seed) for k, v in spec.items()}
    if spec.kind == "discrete":
        drawn = rng.integers(0, spec.sizes[0], size=lead) + spec.start
        return int(drawn) if n is None else drawn
    return rng.normal(size=(*lead, *spec.shape)).astype(spec.dtype)


ACTIONS = {
    "choice": CHOICE,
    "choices": CHOICES,
    "box": BOX,
    "scalar": SCALAR,
    "nested": {"x": CHOICE, "y": (BOX, SCALAR)},
}


@pytest.mark.parametrize("obs", [VECTOR, CHOICE, NESTED, SCALAR], ids=["vector", "choice", "nested", "scalar"])
@pytest.mark.parametrize("action", ACTIONS)
def test_predict_gives_what_the_environment_takes(obs: Any, action: str):
    policy = ppo_policy(obs, ACTIONS[action], log_std_init=3.0)
    for n in (None, 1, 2, 5):
        for deterministic in (True, False):
            answer = policy.predict(obs_of(obs, n), deterministic=deterministic)
            for leaf, a in zip(tree_leaves(ACTIONS[action]), tree_leaves(answer)):
                assert np.shape(a) == leaf.shape if n is None else (n, *leaf.shape)
                if n is None and leaf.kind == "discrete":
                    assert type(a) is int
                else:
                    assert a.dtype == leaf.dtype
                if leaf.kind == "box":
                    assert (a >= leaf.bound("low")).all()
                    assert (a <= leaf.bound("high")).all()
                if leaf.kind == "discrete":
                    assert np.all((np.asarray(a) >= 2) & (np.asarray(a) < 6))


def test_one_observation_is_a_batch_of_one():
    for action in (CHOICE, BOX):
        policy = ppo_policy(VECTOR, action)
        many = obs_of(VECTOR, 9)
        whole = policy.predict(many)
        for i in range(9):
            assert np.array_equal(policy.predict(many[i]), whole[i])
            assert np.array_equal(policy.predict(many[i : i + 3]), whole[i : i + 3])


def test_a_deterministic_answer_is_the_mode_and_a_sample_varies():
    policy = ppo_policy(VECTOR, BOX)
    x = obs_of(VECTOR, None)
    modes = [policy.predict(x) for _ in range(3)]
    with torch.no_grad():
        dist, _ = policy.agent(Inputs(torch.from_numpy(x).expand(4, 3), None, None, None))
    assert all(np.array_equal(m, dist.mode()[0].numpy()) for m in modes)
    samples = [policy.predict(x, deterministic=False) for _ in range(3)]
    assert len({s.tobytes() for s in samples}) == 3
    again = ppo_policy(VECTOR, BOX)
    assert [again.predict(x, deterministic=False).tobytes() for _ in range(3)] == [s.tobytes() for s in samples]


def test_samples_have_the_right_frequencies():
    policy = ppo_policy(VECTOR, CHOICE)
    x = np.broadcast_to(obs_of(VECTOR, None), (8000, 3))
    with torch.no_grad():
        dist, _ = policy.agent(Inputs(torch.from_numpy(x[:4].copy()), None, None, None))
    p = dist.logp[0].exp().numpy()
    counts = np.bincount(policy.predict(x, deterministic=False) - 2, minlength=4)
    assert ((counts - 8000 * p) ** 2 / (8000 * p)).sum() < 21.1  # 3 degrees of freedom, p = 0.0001


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("n", [None, 3])
def test_a_recurrent_policy_hands_its_state_back(kind: Any, n: int | None):
    """Step by step through predict is the unroll of the agent, with its own actions and rewards fed back."""
    policy = ppo_policy(VECTOR, CHOICE, recurrent=kind, recurrent_size=8, prev_action=True, prev_reward=True)
    with torch.no_grad():
        policy.agent.head.linear.weight.mul_(100)  # pyright: ignore
    xs = [obs_of(VECTOR, n, seed=t) for t in range(8)]
    rows = n or 1
    rewards = np.linspace(-3, 3, 8 * rows).reshape(8, rows)
    actions, state = [], None
    for t in range(8):
        reward = float(rewards[t, 0]) if n is None else rewards[t]
        action, state = policy.predict(xs[t], state, prev_reward=0.0 if t == 0 else reward)
        actions.append(np.reshape(action, rows))
    sequence = Inputs(
        torch.from_numpy(np.stack(xs).reshape(8, rows, 3)),
        torch.from_numpy(np.stack([np.full(rows, 2), *actions[:-1]])),
        torch.from_numpy(rewards.astype(np.float32)),
        torch.tensor([True] + [False] * 7).unsqueeze(1).expand(8, rows),
    )
    with torch.no_grad():
        dist, _ = policy.agent(sequence, policy.agent.initial_state(rows))
    assert np.array_equal(dist.mode().numpy(), np.stack(actions))
    assert len(np.unique(np.stack(actions))) > 1


def test_predict_feeds_the_reward_to_a_network_that_reads_it_without_memory():
    sampler = SerialSampler(1, 1).build(ThreeStep)
    policy = PPO(net=Net(hidden=(8,), prev_reward=True, squash=False)).build(sampler.spec, seed=1)
    for p in policy.agent.parameters():
        p.data.fill_(0.1)
    obs = np.zeros(sampler.spec.obs.shape, sampler.spec.obs.dtype)  # pyright: ignore
    inputs: list[Any] = []
    act = policy.agent.act
    policy.agent.act = lambda x, *rest: (inputs.append(x.prev_reward), act(x, *rest))[1]  # pyright: ignore
    policy.predict(obs, prev_reward=2.5)
    assert inputs[0][0] == 2.5


def test_predict_refuses_a_state_that_is_not_of_these_rows():
    policy = ppo_policy(VECTOR, CHOICE, recurrent="lstm", recurrent_size=8)
    _, state = policy.predict(obs_of(VECTOR, 4, seed=0))
    with pytest.raises(ConfigError, match=r"state is of 4 rows, padded to a multiple of 4, and obs of 8"):
        policy.predict(obs_of(VECTOR, 6, seed=1), state)
    for bad in (3, (), state[0], [state]):
        with pytest.raises(ConfigError, match=r"predict: state is .*expected what the call before returned"):
            policy.predict(obs_of(VECTOR, 4, seed=1), bad)


def test_predict_names_the_shapes_it_expects():
    policy = ppo_policy(NESTED, CHOICE)
    for bad, text in (
        (np.zeros(3, np.float32), r"obs is ndarray; expected a dict with keys \['a', 'b'\]"),
        ({"a": np.zeros(3, np.float32), "c": 2}, r"obs is \['a', 'c'\]; expected a dict with keys \['a', 'b'\]"),
        (
            {"a": np.zeros(2, np.float32), "b": 2},
            r"obs\['a'\] is float32\[2\]; expected float32\[3\], or a batch \[N, 3\]",
        ),
        ({"a": [[1.0], [2.0, 3.0]], "b": 2}, r"obs\['a'\] is no array"),
        ({"a": np.zeros((5, 3), np.float32), "b": 2}, r"got leading dimensions \[\(\), \(5,\)\]"),
    ):
        with pytest.raises(ConfigError, match=text):
            policy.predict(bad)


@pytest.mark.parametrize(
    ("shape", "call"),
    [((8, 9, 3), "np.moveaxis(obs, -1, -3)"), ((5, 8, 9, 3), "np.moveaxis(obs, -1, -3)"), ((9, 8, 3), "")],
)
def test_predict_names_the_call_that_moves_channels_to_the_other_end(shape: tuple[int, ...], call: str) -> None:
    policy = ppo_policy(LeafSpec("box", (3, 8, 9), "uint8", 0.0, 255.0), CHOICE)
    obs = np.zeros(shape, np.uint8)
    with pytest.raises(ConfigError, match="expected uint8") as told:
        policy.predict(obs)
    assert (f"; its channels stand at the other end: {call}" in str(told.value)) == bool(call)
    if call:
        policy.predict(eval(call, {"np": np, "obs": obs}))


# --- storage


GREY = LeafSpec("box", (4, 4, 1), "uint8", 0.0, 255.0)
PAIR = LeafSpec("multi_discrete", (2,), "int32", sizes=(3, 4), start=(0, -1))


@pytest.mark.parametrize(
    ("leaf", "given", "message"),
    [
        (GREY, np.full((4, 4, 1), 0.5, np.float32), r"obs is float32, and 0.5 is no uint8; .*images in \[0, 1\]\?"),
        (GREY, np.full((4, 4, 1), 256), r"obs is int64, and 256 is no uint8"),
        (GREY, np.full((4, 4, 1), np.nan), r"nan is no uint8"),
        (LeafSpec("discrete", (), "int64", sizes=(5,), start=-1), 4, r"obs is 4; expected -1 to 3"),
        (LeafSpec("discrete", (), "int64", sizes=(5,)), 2.9, r"obs is float64, and 2.9 is no int64"),
        (PAIR, [[0, 2], [2, 3]], r"obs\[1\] is 3; expected -1 to 2"),
        (LeafSpec("multi_binary", (3,), "int8"), [0, 2, 1], r"obs\[1\] is 2; expected 0 to 1"),
        (LeafSpec("box", (2,), "bool", 0.0, 1.0), [1.0, 0.3], r"obs is float64, and 0.3 is no bool"),
        (LeafSpec("box", (2,), "float32"), [1e300, 0.0], r"obs is float64, and 1e\+300 is no float32"),
    ],
)
def test_predict_refuses_what_its_cast_would_change(leaf: LeafSpec, given: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        ppo_policy(leaf, CHOICE).predict(given)


def test_predict_takes_equal_values_of_other_dtypes():
    policy = ppo_policy(GREY, CHOICE)
    pixels = np.arange(16, dtype=np.uint8).reshape(4, 4, 1) * 16
    assert policy.predict(pixels) == policy.predict(pixels.astype(np.float64)) == policy.predict(pixels.tolist())
    assert ppo_policy(LeafSpec("box", (2,), "float32"), CHOICE).predict([0.1, 1]) in range(2, 6)


def roll(policy: Policy, env: Any, batches: int = 4) -> list[SampleBatch]:
    sampler = SerialSampler(T=12, B=4).build(env, seed=3)
    sampler.initialize(policy.agent)
    return [sampler.obtain_samples(k)[0].copy() for k in range(batches)]


CASES = {
    "plain": (ThreeStep, Net(hidden=(8,))),
    "statistics": (ThreeStep, Net(hidden=(8,), normalize_obs=True, normalize_reward=True)),
    "lstm": (RepeatPrevious, Net(hidden=(8,), recurrent="lstm", recurrent_size=8, normalize_reward=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stored_policy_goes_on_to_the_same_bits(case: str):
    env, net = CASES[case]
    algo = PPO(net=net, minibatch=12, epochs=2, lr="linear(1e-2, 0)")

    def build() -> Policy:
        sampler = SerialSampler(T=2, B=1).build(env)
        return algo.build(sampler.spec, seed=5)

    straight, stored, resumed = build(), build(), build()
    batches = roll(straight, env)
    for policy in (straight, stored):
        for i, batch in enumerate(batches[:2]):
            policy.set_progress(i / 4)
            train_one_step(policy, batch)
    stored.predict(batches[0].obs[0], deterministic=False)
    straight.predict(batches[0].obs[0], deterministic=False)
    file = io.BytesIO()
    torch.save(stored.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for policy in (straight, resumed):
        for i, batch in enumerate(batches[2:]):
            policy.set_progress((i + 2) / 4)
            train_one_step(policy, batch)
    ours, theirs = straight.state_dict(), resumed.state_dict()
    assert tree_bytes(ours) == tree_bytes(theirs)
    assert ours["counters"] == theirs["counters"]
    assert ours["counters"]["version"] == 4
    if net.is_recurrent:
        return
    answers = [p.predict(batches[0].obs[0], deterministic=False) for p in (straight, resumed)]
    assert np.array_equal(*answers)


def tree_bytes(tree: Any) -> list[bytes]:
    return [x.numpy().tobytes() if isinstance(x, Tensor) else repr(x).encode() for x in tree_leaves(tree)]


def test_parameters_that_do_not_fit_are_refused():
    policy = ppo_policy(VECTOR, CHOICE)
    wider = ppo_policy(VECTOR, CHOICE, hidden=(32,))
    with pytest.raises(
        CheckpointError, match=r"weight is \[\d+, \d+\] there and \[\d+, \d+\] here, and \d+ more such; were net"
    ):
        policy.load_state_dict(wider.state_dict())
    with pytest.raises(CheckpointError, match="which has actor"):
        policy.load_parameters({})
    other = ppo_policy(VECTOR, CHOICE, seed=9)
    policy.load_parameters(other.agent.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(policy.agent.parameters(), other.agent.parameters()))
    assert policy.updates == 0


def test_settings_are_not_changed_by_progress():
    algo = PPO(lr="linear(1, 0)")
    policy = algo.build(EnvSpec(VECTOR, CHOICE))
    policy.set_progress(0.5)
    assert policy.settings == replace(algo, lr=0.5)
    assert algo.lr == "linear(1, 0)"
    policy.set_progress(0.0)
    assert policy.settings.lr == 1.0


def test_the_step_size_of_the_settings_wins_over_a_stored_one():
    stored = line_policy(settings=LineSettings(lr=0.5))
    stored.learn_on_batch(line_batch())
    constant, annealed = (
        line_policy(settings=LineSettings(lr=0.2)),
        line_policy(settings=LineSettings(lr="linear(1, 0)")),
    )
    for policy in (constant, annealed):
        policy.load_state_dict(stored.state_dict())
    annealed.set_progress(0.25)
    for policy, lr in ((stored, 0.5), (constant, 0.2), (annealed, 0.75)):
        assert policy.optimizers["all"].param_groups[0]["lr"] == lr
        before = policy.agent.weight.item()  # pyright: ignore
        policy.learn_on_batch(line_batch())
        assert policy.agent.weight.item() == pytest.approx(before - lr * 2)  # pyright: ignore


def test_a_proportion_of_the_settings_wins_over_a_stored_one():
    spec = EnvSpec(VECTOR, LeafSpec("box", (1,), "float32", low=-1.0, high=1.0))
    stored, other = (TD3(lr="linear(1e-3, 0)", actor_lr=lr).build(spec) for lr in (5e-4, 2e-3))
    other.load_state_dict(stored.state_dict())
    other.set_progress(0.5)
    assert {name: x.param_groups[0]["lr"] for name, x in other.optimizers.items()} == {"critic": 5e-4, "actor": 1e-3}


def put_in_later(policy: Policy) -> None:
    """A new layer in the place of PPO's actor's first; the critic's stay as they were."""
    layers: Any = policy.agent.get_submodule("actor.mlp.layers")
    layers[0] = nn.Linear(layers[0].in_features, layers[0].out_features)


@pytest.mark.parametrize("cure", ["none", "frozen", "rebuilt", "apart"])
def test_layers_put_in_after_the_policy_was_built_are_refused_at_the_first_update(cure: str) -> None:
    sampler = SerialSampler(T=8, B=2).build(ThreeStep, seed=0)
    policy = PPO(net=Net(hidden=(4,)), epochs=1, minibatch=16).build(sampler.spec)
    if cure == "apart":
        policy.agent.probe = nn.Linear(2, 2)  # trained by nobody's loss here
    else:
        put_in_later(policy)
    layers: Any = policy.agent.get_submodule("actor.mlp.layers")
    layer = layers[0]
    if cure == "frozen":
        layer.requires_grad_(False)
    if cure == "rebuilt":
        policy.optimizers = policy.optimizer_fn(policy.agent, policy.settings)
    sampler.initialize(policy.agent)
    batch, _ = sampler.obtain_samples(0)
    before = layer.weight.detach().clone()
    if cure == "none":
        with pytest.raises(ConfigError, match=r"^actor.mlp.layers.0.weight, actor.mlp.layers.0.bias: .*optimizer_fn\("):
            train_one_step(policy, batch)
        return
    train_one_step(policy, batch)
    assert (layer.weight != before).any() == (cure != "frozen")
    put_in_later(policy)
    train_one_step(policy, batch)  # looked at once


@pytest.mark.parametrize("algo", [PPO(), SAC()])
def test_an_action_without_elements_is_refused(algo: Any) -> None:
    empty = LeafSpec("box", (0,), "float32", -1.0, 1.0)
    for action in (empty, {"a": CHOICE, "b": empty}):
        with pytest.raises(
            ConfigError, match=r"an action without elements, .*box\[0\] float32.*; expected at least one"
        ):
            algo.build(EnvSpec(VECTOR, action))


def test_a_state_that_is_no_policys_is_named():
    policy = PPO(net=Net(hidden=(4,))).build(EnvSpec(VECTOR, CHOICE), 0)
    with pytest.raises(CheckpointError, match=r"has nothing and no agent and no optimizers and no counters; expected"):
        policy.load_state_dict({})
    with pytest.raises(CheckpointError, match=r"has actor.* and no agent.*go into load_parameters\(\)"):
        policy.load_state_dict(policy.agent.state_dict())
