import copy
import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.agents.networks import Net
from penstock.algos import find_algo
from penstock.algos.dqn import DQN
from penstock.algos.ppo import PPO
from penstock.core.batch import Inputs
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.learn.optimizers import Adam, adam, make_optimizer, rmsprop, trainable
from penstock.learn.step.groups import decayed_weights, scaled_groups
from penstock.native import library


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the native kernel, whose steps tests/native compares with torch's."""
    monkeypatch.setattr(library, "found", None)


def set_gradients(module: nn.Module, step: int, without: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(module.parameters()):
        p.grad = None if i in without else torch.randn(p.shape, generator=generator) * 10.0 ** (i - 2)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))


@pytest.mark.usefixtures("by_torch")
def test_adam_is_torchs_bit_for_bit():
    a, b = net(), net()
    ours, theirs = (
        Adam(a.parameters(), lr=0.01, eps=1e-5),
        torch.optim.Adam(b.parameters(), lr=0.01, eps=1e-5, fused=True),
    )
    for step in range(30):
        if step == 10:
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["lr"] = 0.001
        for module, optimizer in ((a, ours), (b, theirs)):
            set_gradients(module, step)
            optimizer.step()
        assert same(a, b), step


def test_the_first_step_is_lr_long():
    p = nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    optimizer = Adam([p], lr=0.1, eps=1e-5)
    p.grad = torch.tensor([3.0, -0.01, 0.0])
    optimizer.step()
    assert p.tolist() == pytest.approx([0.9, 1 + 0.1 * 0.01 / (0.01 + 1e-5), 1.0], rel=1e-5)


@pytest.mark.usefixtures("by_torch")
def test_a_parameter_without_a_gradient_stays_and_keeps_its_own_count_of_steps():
    """As torch's: a parameter that joins later is corrected for its own number of steps, not for everyone's."""
    a, b = net(), net()
    ours, theirs = Adam(a.parameters(), lr=0.01), torch.optim.Adam(b.parameters(), lr=0.01, fused=True)
    for step, without in enumerate([(0, 3), (3,), (1, 3), (), ()]):
        before = list(a.parameters())[3].clone()
        for module, optimizer in ((a, ours), (b, theirs)):
            set_gradients(module, step, without)
            optimizer.step()
        if 3 in without:
            assert torch.equal(list(a.parameters())[3], before)
        assert same(a, b), step


def test_without_any_gradient_nothing_happens():
    a = net()
    Adam(a.parameters()).step()
    assert same(a, net())


def test_a_stored_adam_goes_on_to_the_same_bits():
    straight, resumed = net(), net(1)
    first = Adam(straight.parameters(), lr=0.01)
    for step in range(5):
        set_gradients(straight, step)
        first.step()
    file = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "net": straight.state_dict()}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    resumed.load_state_dict(stored["net"])
    second = Adam(resumed.parameters(), lr=0.5, betas=(0.5, 0.5))
    second.load_state_dict(stored["optimizer"])
    for step in range(5, 10):
        for module, optimizer in ((straight, first), (resumed, second)):
            set_gradients(module, step)
            optimizer.step()
    assert same(straight, resumed)
    with pytest.raises(CheckpointError, match="was net changed"):
        Adam(nn.Linear(2, 2).parameters()).load_state_dict(first.state_dict())


@pytest.mark.parametrize("make", [adam, rmsprop])
def test_makers_take_what_can_be_trained(make: Any):
    module: Any = net()
    module[0].bias.requires_grad_(False)
    ((name, optimizer),) = make(module, SimpleNamespace(lr=0.25)).items()
    assert name == "all"
    (group,) = optimizer.param_groups
    assert [p.shape for p in group["params"]] == [(5, 3), (1, 5), (1,)]
    assert (group["lr"], group["eps"]) == (0.25, 1e-5)


def test_rmsprop_by_hand():
    """alpha = 0.99: the first step is 1 / sqrt(0.01) = 10 times lr, whatever the gradient."""
    module: Any = nn.Linear(1, 1, bias=False)
    before = module.weight.item()
    optimizer = rmsprop(module, SimpleNamespace(lr=0.01))["all"]
    module.weight.grad = torch.tensor([[5.0]])
    optimizer.step()
    assert module.weight.item() == pytest.approx(before - 0.1, rel=1e-4)
    optimizer.step()
    assert module.weight.item() == pytest.approx(before - 0.1 - 0.01 / (0.99 * 0.01 + 0.01) ** 0.5, rel=1e-4)


def test_nothing_to_train_is_refused():
    frozen: Any = nn.Linear(1, 1)
    for p in frozen.parameters():
        p.requires_grad_(False)
    with pytest.raises(ConfigError, match="Linear has no trainable parameters"):
        trainable(frozen)
    some: list[Tensor] = trainable(net())  # pyright: ignore
    assert len(some) == 4


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "expanded"])
def test_adam_takes_gradients_of_any_memory_layout(layout: str):
    """Backward passes give transposed and channels-last gradients; torch's kernel reads memory in a row."""
    shape = (4, 3) if layout != "channels_last" else (4, 3, 2, 2)
    torch.manual_seed(0)
    a, b = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    ours, theirs = Adam([a], lr=0.1), torch.optim.Adam([b], lr=0.1, foreach=False)
    for _ in range(3):
        gradient = torch.randn(shape)
        if layout == "transposed":
            a.grad = gradient.t().contiguous().t()
        elif layout == "channels_last":
            a.grad = gradient.contiguous(memory_format=torch.channels_last)
        else:
            gradient = gradient[:1].expand(shape)
            a.grad = gradient
        assert a.grad.stride() != a.stride()
        b.grad = gradient.contiguous()
        ours.step()
        theirs.step()
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(2,), (8,), (4, 10, 10)])
def test_a_step_of_a_whole_agent_is_torchs(shape: tuple[int, ...]):
    """From autograd's own gradients: few inputs, many inputs, images."""
    torch.manual_seed(0)
    spec = EnvSpec(LeafSpec("box", shape, "float32"), LeafSpec("discrete", (), "int64", sizes=(3,)))
    agent = DQN(net=Net(hidden=(16, 4), cnn="minatar")).build(spec).agent
    inputs = Inputs(torch.rand(32, *shape), None, None, None)  # pyright: ignore[reportArgumentType]
    parameters = list(agent.online.parameters())  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    wanted = [nn.Parameter(p.detach().clone()) for p in parameters]
    ours, theirs = Adam(parameters, lr=0.01), torch.optim.Adam(wanted, lr=0.01, foreach=False)
    for _ in range(3):
        gradients = torch.autograd.grad(agent(inputs).square().sum(), parameters)
        for p, q, g in zip(parameters, wanted, gradients):
            p.grad, q.grad = g, g.contiguous()
        ours.step()
        theirs.step()
        for p, q in zip(parameters, wanted):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    ("kind", "usual"),
    [
        ("adam", lambda p: torch.optim.Adam(p, lr=0.03, eps=1e-3, weight_decay=0.1, foreach=False)),
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.03, eps=1e-3, weight_decay=0.1, foreach=False)),
        ("radam", lambda p: torch.optim.RAdam(p, lr=0.03, eps=1e-3, weight_decay=0.1, foreach=False)),
        ("rmsprop", lambda p: torch.optim.RMSprop(p, lr=0.03, alpha=0.99, eps=1e-3, weight_decay=0.1)),
    ],
)
def test_the_settings_choose_the_optimizer(kind: Any, usual: Any):
    cfg = PPO(lr=0.01, optimizer=kind, weight_decay=0.1, adam_eps=1e-3)
    a, b = net(), net()
    ours, theirs = make_optimizer(a.parameters(), cfg, 0.03), usual(b.parameters())
    assert ours.param_groups[0]["lr_scale"] == 3.0
    for step in range(5):
        for module, optimizer in ((a, ours), (b, theirs)):
            set_gradients(module, step)
            optimizer.step()
    for x, y in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(x, y)
    module: Any = net()
    assert type(adam(module, cfg)["all"]) is type(ours)  # an algorithm of one's own that says ps.adam obeys too
    without = make_optimizer(net().parameters(), cfg, decays=False)
    assert "weight_decay" not in without.param_groups[0] or without.param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    "name",
    [
        "ppo",
        "a2c",
        "impala",
        "appo",
        "bc",
        "marwil",
        "dqn",
        "r2d1",
        "sac",
        "td3",
        "ddpg",
        "discrete-sac",
        "cql",
        "iql",
        "rebrac",
    ],
)
def test_every_algorithm_obeys(name: str):
    boxes = name in ("sac", "td3", "ddpg", "cql", "rebrac")
    action = (
        LeafSpec("box", (1,), "float32", low=-1.0, high=1.0) if boxes else LeafSpec("discrete", (), "int64", sizes=(2,))
    )
    spec = EnvSpec(LeafSpec("box", (3,), "float32"), action)
    net = Net(hidden=(4,), recurrent="lstm" if name == "r2d1" else "none", recurrent_size=4)
    algo = find_algo(name)(optimizer="adamw", weight_decay=0.5, net=net)
    optimizers = algo.build(spec).optimizers
    assert all(isinstance(o, Adam) for o in optimizers.values())
    decays = {key: o.param_groups[0]["weight_decay"] for key, o in optimizers.items()}  # pyright: ignore
    assert decays == {key: 0.0 if key == "alpha" else 0.5 for key in optimizers}


@pytest.mark.parametrize("name", ["ppo", "r2d1", "noisy", "sac", "gsde"])
def test_weight_matrices_decay_and_nothing_else(name: str):
    norm, choice = {"hidden": (4,), "norm": "layer"}, LeafSpec("discrete", (), "int64", sizes=(2,))
    box = LeafSpec("box", (1,), "float32", low=-1.0, high=1.0)
    kinds: dict[str, tuple[Any, Any]] = {
        "ppo": (PPO(net=Net(**norm)), box),
        "r2d1": (find_algo("r2d1")(net=Net(**norm, recurrent="lstm", recurrent_size=4)), choice),
        "noisy": (find_algo("dqn")(noisy=True, net=Net(**norm)), choice),
        "sac": (find_algo("sac")(net=Net(**norm)), box),
        "gsde": (find_algo("sac")(net=Net(**norm, use_sde=True)), box),
    }
    algo, action = kinds[name]
    spec = EnvSpec(LeafSpec("box", (3,), "float32"), action)
    policy = replace(algo, optimizer="adamw", weight_decay=0.5).build(spec)
    names = {id(p): key for key, p in policy.agent.named_parameters()}
    found: dict[float, set[str]] = {0.5: set(), 0.0: set()}
    for optimizer in policy.optimizers.values():
        for group in optimizer.param_groups:
            found[group["weight_decay"]] |= {names[id(p)].rpartition(".")[2] for p in group["params"]}
    weights = {"weight", "weight_ih_l0", "weight_hh_l0", "weight_0", "weight_1"}
    assert found[0.5]
    assert found[0.5] <= weights
    assert not found[0.0] & (weights - {"weight"})  # LayerNorm's gain is called so, too
    for optimizer in policy.optimizers.values():
        for group in optimizer.param_groups:
            assert all((p.dim() > 1) or group["weight_decay"] == 0.0 for p in group["params"])
    plain = replace(algo, weight_decay=0.0).build(spec)
    assert all(len(optimizer.param_groups) == 1 for optimizer in plain.optimizers.values())


def test_a_norm_over_several_axes_does_not_decay():
    module: Any = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.LayerNorm((2, 4, 4)))
    (optimizer,) = decayed_weights(adam)(module, PPO(optimizer="adamw", weight_decay=0.5)).values()
    decayed = [p for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]]
    assert [p is module[0].weight for p in decayed] == [True]


def test_weights_in_lists_decay_too():
    spec = EnvSpec(LeafSpec("box", (3,), "float32"), LeafSpec("box", (1,), "float32", low=-1.0, high=1.0))
    policy = find_algo("crossq")(optimizer="adamw", weight_decay=0.5, net=Net(hidden=(4,))).build(spec)
    names = {id(p): name for name, p in policy.agent.named_parameters()}
    groups = [group for optimizer in policy.optimizers.values() for group in optimizer.param_groups]
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {f"critics.stack.weights.{i}" for i in (0, 1)} | {"actor.mlp.weights.0", "actor.out.weight"}


def test_an_unknown_optimizer_names_the_nearest():
    with pytest.raises(ConfigError, match=r"optimizer='adamW'; did you mean 'adam' or 'radam' or 'adamw'"):
        PPO(optimizer="adamW")  # pyright: ignore


def test_adamw_decays_as_torchs_by_itself_and_adam_not_at_all():
    for kind, decay in (("adamw", 0.01), ("adam", 0.0), ("rmsprop", 0.0)):
        optimizer: Any = PPO(optimizer=kind).functions.optimizer(net(), PPO(optimizer=kind))["all"]  # pyright: ignore
        found = optimizer.param_groups[0]["weight_decay"]
        assert found == decay
    none: Any = make_optimizer(net().parameters(), PPO(optimizer="adamw", weight_decay=0.0))
    assert none.param_groups[0]["weight_decay"] == 0.0
    temperature: Any = make_optimizer(net().parameters(), PPO(optimizer="adamw"), decays=False)
    assert temperature.param_groups[0]["weight_decay"] == 0.0
    assert PPO().weight_decay is None  # what a stored run without the field is read as


def test_averages_that_nothing_is_added_to_end_at_zero_and_nothing_else_is_flushed():
    p = nn.Parameter(torch.ones(40))
    optimizer = Adam([p])
    p.grad = torch.ones(40)
    optimizer.step()
    before = p.detach().clone()
    p.grad.zero_()
    for _ in range(1200):
        optimizer.step()
    (average,) = optimizer.state_dict()["averages"]
    assert (average == 0.0).all() and (p < before).all()
    assert torch.tensor([1e-30]).mul(1e-10).item() > 0.0


def test_a_thread_that_flushes_goes_on_to():
    p = nn.Parameter(torch.ones(40))
    p.grad = torch.ones(40)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        Adam([p]).step()
        assert torch.tensor([1e-30]).mul(1e-10).item() == 0.0
    finally:
        torch.set_flush_denormal(False)


SCALED = PPO(net=Net(hidden=(4,)), lr_scales={"actor.mlp.*": 0.1, "layers.0.bias": 5.0, "*_head.*": 2.0})


def parameters_by_rate(policy: Any) -> dict[str, float]:
    names = {id(p): name for name, p in policy.agent.named_parameters()}
    groups = [group for x in policy.optimizers.values() for group in x.param_groups]
    return {names[id(p)]: group["lr"] for group in groups for p in group["params"]}


def test_patterns_of_names_part_the_step_sizes_and_the_first_that_matches_counts():
    policy = SCALED.build(EnvSpec(LeafSpec("box", (3,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,))))
    rates = parameters_by_rate(policy)
    assert rates.keys() == {name for name, _ in policy.agent.named_parameters()}
    scales = {name: rate / 3e-4 for name, rate in rates.items()}
    assert scales["actor.mlp.layers.0.weight"] == scales["actor.mlp.layers.0.bias"] == pytest.approx(0.1)
    assert scales["critic.mlp.layers.0.bias"] == pytest.approx(5.0)
    assert scales["value_head.weight"] == pytest.approx(2.0)
    assert scales["critic.mlp.layers.0.weight"] == scales["head.linear.weight"] == 1.0
    assert len(policy.optimizers["all"].param_groups) == 4


@pytest.mark.parametrize("kind", ["adam", "adamw", "rmsprop"])
def test_parted_groups_step_as_optimizers_of_their_own_would(kind: Any):
    a, b = net(), net()
    first, second = b.children()
    settings = SimpleNamespace(lr=0.01, optimizer=kind, lr_scales={"1.*": 0.25})
    agents = [SimpleNamespace(named_parameters=x.named_parameters, parameters=x.parameters) for x in (a, b)]

    def optimizer_fn(agent: Any, settings: Any) -> Any:
        return {"all": make_optimizer(agent.parameters(), settings)}

    parted = scaled_groups(optimizer_fn)(agents[0], settings)["all"]  # pyright: ignore
    alone = [make_optimizer(first.parameters(), settings), make_optimizer(second.parameters(), settings, 0.0025)]
    for step in range(5):
        for module in (a, b):
            set_gradients(module, step, (2,) if step == 2 else ())
        parted.step()
        for optimizer in alone:
            optimizer.step()
        assert same(a, b), step
    again = scaled_groups(optimizer_fn)(agents[1], settings)["all"]  # pyright: ignore
    again.load_state_dict(copy.deepcopy(parted.state_dict()))  # torch keeps the tensors it is given
    for step in (5, 6):
        for module, optimizer in ((a, parted), (b, again)):
            set_gradients(module, step)
            optimizer.step()
        assert same(a, b), step


def test_scaled_groups_follow_the_schedule_and_come_back_from_a_checkpoint():
    spec = EnvSpec(LeafSpec("box", (3,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))
    algo = replace(SCALED, lr="linear(1e-3, 0)")
    policy, other = algo.build(spec), algo.build(spec, 1)
    policy.set_progress(0.5)
    rates = parameters_by_rate(policy)
    assert rates["actor.mlp.layers.0.weight"] == pytest.approx(5e-5) and rates["head.linear.weight"] == 5e-4
    other.load_state_dict(policy.state_dict())
    other.set_progress(0.5)
    assert parameters_by_rate(other) == rates
    without = replace(algo, lr_scales=None).build(spec)
    without.load_state_dict(policy.state_dict())  # the settings that are given count
    without.set_progress(0.5)
    assert set(parameters_by_rate(without).values()) == {5e-4}


def test_factors_change_in_a_run():
    spec = EnvSpec(LeafSpec("box", (3,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))
    policy, twin = (
        SCALED.build(spec),
        replace(SCALED, lr_scales={**(SCALED.lr_scales or {}), "actor.mlp.*": 0.5}).build(spec),
    )
    policy.taking_settings_of(twin)()
    assert parameters_by_rate(policy) == parameters_by_rate(twin) != parameters_by_rate(SCALED.build(spec))


def test_a_pattern_that_matches_nothing_and_a_factor_that_is_none_are_refused():
    spec = EnvSpec(LeafSpec("box", (3,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))
    with pytest.raises(ConfigError, match=r"lr_scales\['encoder.*'\] matches no parameter.*actor.mlp.layers.0.\*"):
        PPO(lr_scales={"encoder.*": 0.1}).build(spec)
    with pytest.raises(ConfigError, match=r"lr_scales\['target.*'\] matches no parameter that an optimizer holds"):
        DQN(lr_scales={"target.*": 0.1}).build(spec)
    for scale in (0.0, -1.0, float("inf")):
        with pytest.raises(ConfigError, match=r"lr_scales\['a'\].*expected more than 0, finite.*encoder_freeze"):
            PPO(lr_scales={"a": scale})


@pytest.mark.parametrize("kind", ["adam", "rmsprop", "radam"])
@pytest.mark.parametrize("before", [0.0, 0.1])
def test_weight_decay_is_switched_within_a_run_and_by_a_stored_state(before: float, kind: Any):
    """Weights get a group of their own, or lose it; every parameter keeps its own moments."""
    spec = EnvSpec(LeafSpec("box", (3,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))

    def built(weight_decay: float, seed: int) -> Any:
        return PPO(weight_decay=weight_decay, optimizer=kind).build(spec, seed=seed)

    def moments(policy: Any) -> dict[str, Tensor]:
        optimizer = policy.optimizers["all"]
        if kind == "adam":
            held = {id(p): x for p, x in zip(optimizer._params, optimizer._averages)}
        else:
            name = "square_avg" if kind == "rmsprop" else "exp_avg"
            held = {id(p): optimizer.state[p][name] for p in policy.agent.parameters()}
        return {name: held[id(p)].clone() for name, p in policy.agent.named_parameters()}

    policy, after = built(before, 1), 0.1 - before
    for p in policy.agent.parameters():
        p.grad = torch.randn_like(p)
    policy.optimizers["all"].step()
    expected = moments(policy)
    restored = built(after, 2)
    restored.load_state_dict(policy.state_dict())
    policy.taking_settings_of(built(after, 1))()
    for one in (policy, restored):
        decays = {id(p): group["weight_decay"] for group in one.optimizers["all"].param_groups for p in group["params"]}
        found = moments(one)
        for name, p in one.agent.named_parameters():
            assert torch.equal(found[name], expected[name]), name
            assert decays[id(p)] == (after if "weight" in name else 0.0), name
