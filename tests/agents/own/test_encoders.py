"""Encoders of a user's own stand where the built-in ones do, in every agent; wrong ones are refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.agents.agent import Agent
from penstock.agents.networks import Encoder
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.testing import check_agent
from tests.agents.own.encoders import Dots, Everything, Pixels, Tanh, Wide

VECTOR = LeafSpec("box", (3,), "float32", -1.0, 1.0)
IMAGE = LeafSpec("box", (12, 12, 1), "uint8", 0.0, 255.0)
CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,), start=2)
BOX = LeafSpec("box", (2,), "float32", -1.0, 1.0)
DICT = {"camera": IMAGE, "vector": VECTOR, "choice": CHOICE}
SMALL: dict[str, Any] = {"batch_size": 16, "replay_ratio": 4, "learning_starts": 32}
SELDOM: dict[str, Any] = {**SMALL, "replay_ratio": 1}
R2D1: dict[str, Any] = {
    **SMALL, "batch_size": 4, "replay_ratio": 2, "burn_in": 4, "train_length": 8, "state_interval": 8
}  # fmt: skip
MEMORY = ps.Net(hidden=(32, 32), activation="relu", recurrent="lstm", recurrent_size=16)


def trained(env: Any, algo: Any, batches: int = 12) -> Any:
    sampler = ps.SerialSampler(T=8, B=4).build(env, seed=1)
    policy = algo.build(sampler.spec, seed=1, total_steps=1000)
    policy.prepare(BatchSpec(8, 4), sampler.initialize(policy.agent)["info"])
    for itr in range(batches):
        ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    sampler.shutdown()
    assert policy.updates > 5
    return policy


PAIRS: dict[str, tuple[Any, Any, Any, Any]] = {
    "ppo": ("CartPole-v1", ps.PPO(epochs=2, minibatch=16), ps.Net(hidden=(32, 32)), Tanh),
    "ppo-lstm": ("CartPole-v1", ps.PPO(epochs=1, minibatch=16), replace(MEMORY, activation="tanh"), Tanh),
    "dqn": ("CartPole-v1", ps.DQN(**SMALL), ps.Net(hidden=(32, 32), activation="relu"), Wide),
    "r2d1": ("CartPole-v1", ps.R2D1(**R2D1), MEMORY, Wide),
    "sac": (Dots, ps.SAC(**SELDOM), ps.Net(hidden=(16,), activation="relu"), Pixels),
}


@pytest.mark.parametrize("case", PAIRS)
def test_an_encoder_that_is_the_built_in_network_learns_alike(case: str) -> None:
    env, algo, net, encoder = PAIRS[case]
    hidden = net.hidden if encoder is Pixels else ()
    built_in = trained(env, replace(algo, net=net))
    own = trained(env, replace(algo, net=replace(net, hidden=hidden, encoder=encoder)))
    assert any(".encoder.own.obs." in name for name, _ in own.agent.named_parameters())
    assert own.updates == built_in.updates
    pairs = zip(own.agent.parameters(), built_in.agent.parameters(), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def spec_of(obs: Any, action: LeafSpec = CHOICE, agents: int = 1) -> EnvSpec:
    return EnvSpec(obs, action, agents)


TEAM = {"obs": VECTOR, "state": LeafSpec("box", (5,), "float32", -1.0, 1.0)}
AGENTS: dict[str, tuple[Any, EnvSpec]] = {
    "ppo": (ps.PPO(), spec_of(DICT)),
    "ppo-shared": (ps.PPO(net=ps.Net(shared=True)), spec_of(DICT)),
    "ppo-gru": (ps.PPO(net=ps.Net(recurrent="gru", prev_action=True)), spec_of(DICT)),
    "ppo-normalised": (ps.PPO(net=ps.Net(normalize_obs=True)), spec_of(DICT)),
    "a2c": (ps.A2C(), spec_of(VECTOR, BOX)),
    "impala": (ps.IMPALA(), spec_of(VECTOR)),
    "appo": (ps.APPO(), spec_of(VECTOR)),
    "dqn": (ps.DQN(dueling=True, noisy=False), spec_of(DICT)),
    "rainbow": (ps.DQN(dueling=True, noisy=True, distributional="c51"), spec_of(DICT)),
    "r2d1": (ps.R2D1(), spec_of(DICT)),
    "sac": (ps.SAC(), spec_of(DICT, BOX)),
    "sac-sde": (ps.SAC(net=ps.Net(use_sde=True, activation="relu")), spec_of(DICT, BOX)),
    "td3": (ps.TD3(), spec_of(DICT, BOX)),
    "ddpg": (ps.DDPG(), spec_of(VECTOR, BOX)),
    "discrete-sac": (ps.DiscreteSAC(), spec_of(DICT)),
    "cql": (ps.CQL(), spec_of(VECTOR, BOX)),
    "cql-choices": (ps.CQL(), spec_of(VECTOR)),
    "bc": (ps.BC(), spec_of(DICT)),
    "marwil": (ps.MARWIL(), spec_of(DICT)),
    "qmix": (ps.QMIX(), spec_of(TEAM, CHOICE, 2)),
    "mappo": (ps.MAPPO(), spec_of(TEAM, CHOICE, 2)),
}


@pytest.mark.parametrize("case", AGENTS)
def test_every_algorithm_takes_an_encoder(case: str) -> None:
    algo, spec = AGENTS[case]
    net = replace(algo.net, encoder="tests.agents.own.encoders:Everything", image="auto")
    agent = replace(algo, net=net).build(spec, 0).agent
    encoders = [(name, m) for name, m in agent.named_modules() if isinstance(m, Encoder)]
    assert encoders
    for name, encoder in encoders:
        assert isinstance(encoder.own["obs"], Everything) and not encoder.images, name
        assert next(encoder.own["obs"].parameters()).requires_grad == ("target" not in name)
    if case not in ("rainbow",):  # which explores by its parameters
        check_agent(agent, spec, explores=case not in ("bc", "cql", "cql-choices", "td3", "ddpg"))


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_an_encoder_of_one_key_leaves_the_others_to_the_default(recurrent: Any) -> None:
    net = ps.Net(encoder={"camera": Pixels}, recurrent=recurrent, recurrent_size=8, hidden=(16,))
    encoder = Encoder(DICT, CHOICE, net)
    assert encoder.size == 64 * 36 + 4 + 3 and set(encoder.own) == {"camera"} and not encoder.images
    camera = torch.randint(0, 255, (5, 12, 12, 1), dtype=torch.uint8)
    obs = {"camera": camera, "vector": torch.rand(5, 3), "choice": torch.tensor([2, 3, 4, 5, 2])}
    inputs = Inputs(obs, None, torch.zeros(5), torch.zeros(5, dtype=torch.bool))
    out = encoder(inputs, obs)
    torch.testing.assert_close(out[:, : 64 * 36], encoder.own["camera"](camera))
    torch.testing.assert_close(
        out[:, 64 * 36 :], torch.cat([nn.functional.one_hot(obs["choice"] - 2, 4), obs["vector"]], 1)
    )
    assert encoder.in_words() == {"['camera']": "Pixels, 2304 features"}
    check_agent(ps.PPO(net=net).build(spec_of(DICT), 0).agent, spec_of(DICT))


def test_keys_that_cannot_name_a_module_are_numbered() -> None:
    obs = {"values": VECTOR, "a.b": VECTOR}
    encoder = Encoder(obs, CHOICE, ps.Net(encoder={"values": Wide, "a.b": Wide}))
    assert set(encoder.own) == {"0", "1"} and encoder.size == 64
    x = {"values": torch.rand(2, 3), "a.b": torch.rand(2, 3)}
    out = encoder(Inputs(x, None, torch.zeros(2), torch.zeros(2, dtype=torch.bool)), x)
    torch.testing.assert_close(out, torch.cat([encoder.own["1"](x["a.b"]), encoder.own["0"](x["values"])], 1))


def test_the_state_of_a_team_goes_to_an_encoder_of_the_critic_alone() -> None:
    algo = ps.MAPPO(net=ps.Net(encoder={"state": Everything, "obs": Wide}))
    agent: Any = algo.build(spec_of(TEAM, CHOICE, 2), 0).agent
    assert set(agent.actor.encoder.own) == {"obs"} and set(agent.critic.encoder.own) == {"obs", "state"}


class Wrong(nn.Module):
    def __init__(self, obs: Any) -> None:
        super().__init__()
        self.features = 5
        self.layer = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class NoFeatures(Wrong):
    def __init__(self, obs: Any) -> None:
        super().__init__(obs)
        del self.features
        self.features_dim = 5


class Float(Wrong):
    def __init__(self, obs: Any) -> None:
        super().__init__(obs)
        self.features: Any = 5.0


class OneRow(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(0, keepdim=True)


class Narrow(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, :4]


class Half(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).half()


class Nan(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / x.norm(dim=1, keepdim=True) * 0.0


class Dropout(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.5, self.training)


class BatchNorm(Wrong):
    def __init__(self, obs: Any) -> None:
        super().__init__(obs)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


class OfTheBatch(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


class Misfit(Wrong):
    def __init__(self, obs: Any) -> None:
        super().__init__(obs)
        self.layer = nn.Linear(4, 5)


BAD: dict[str, tuple[Any, str]] = {
    "no module": (lambda obs: "text", "returned str; expected a torch.nn.Module"),
    "made already": (Wrong(None), "made already; expected its class"),
    "features": (NoFeatures, "no `features`.*features_dim.*self.features = 64"),
    "a float": (Float, "features=5.0"),
    "rows": (OneRow, r"returned shape \[1, 5\].*expected a tensor \[6, 5\]"),
    "width": (Narrow, r"returned shape \[6, 4\].*expected a tensor \[6, 5\]"),
    "dtype": (Half, "float16; expected torch.float32"),
    "nan": (Nan, "returned NaN for observations within their bounds"),
    "dropout": (Dropout, "otherwise in training than in acting.*self.eval()"),
    "batch norm": (BatchNorm, r"otherwise in training than in acting, by its layers norm \(BatchNorm1d\).*LayerNorm"),
    "of the batch": (OfTheBatch, "otherwise to a row when other rows stand beside it"),
    "layers": (Misfit, "fails on 6 observations of box.*RuntimeError"),
    "path": ("tests.agents.own.encoders:Missing", "no 'Missing'"),
    "module": ("no_such_module:Encoder", "cannot import"),
    "key": ({"camera": Wrong}, "has no such key"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_encoders_are_refused_when_the_agent_is_built(case: str) -> None:
    encoder, said = BAD[case]
    with pytest.raises(ConfigError, match=said) as error:
        ps.PPO(net=ps.Net(encoder=encoder)).build(spec_of(VECTOR), 0)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("net.encoder")


class Convolution(Wrong):
    def __init__(self, obs: Any) -> None:
        super().__init__(obs)
        self.layer = nn.Sequential(nn.Conv2d(3, 2, 4), nn.Flatten(), nn.Linear(2 * 6 * 6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.turned(x))

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        return x


class Turned(Convolution):
    @staticmethod
    def turned(x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2).float() / 255


def test_an_encoder_of_images_that_fails_is_told_how_they_are_recorded() -> None:
    image = LeafSpec("box", (9, 9, 3), "uint8", 0.0, 255.0)
    with pytest.raises(ConfigError, match=r"for a Conv2d: x = x\.permute\(0, 3, 1, 2\)\.float\(\) / 255$"):
        ps.PPO(net=ps.Net(encoder=Convolution)).build(spec_of(image), 0)
    ps.PPO(net=ps.Net(encoder=Turned)).build(spec_of(image), 0)


def test_unknown_keys_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"net.encoder\['camra'\].*camera"):
        ps.PPO(net=ps.Net(encoder={"camra": Pixels})).build(spec_of(DICT), 0)


class InEval(BatchNorm):
    def __init__(self, obs: Any) -> None:
        super().__init__(obs)
        self.eval()


def test_an_encoder_in_eval_may_have_batch_norm_and_the_trial_leaves_no_trace() -> None:
    agent: Any = ps.PPO(net=ps.Net(encoder=InEval)).build(spec_of(VECTOR), 0).agent
    norm = agent.actor.encoder.own["obs"].norm
    assert not norm.training and norm.num_batches_tracked == 0 and agent.actor.mlp.training
    check_agent(agent, spec_of(VECTOR))


class Counting(Wrong):
    def __init__(self, obs: Any) -> None:
        super().__init__(obs)
        self.register_buffer("rows", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("rows").add_(len(x))
        return self.layer(x)


def test_the_trial_leaves_buffers_as_they_were() -> None:
    encoder: Any = Encoder(VECTOR, CHOICE, ps.Net(encoder=Counting)).own["obs"]
    assert encoder.rows == 0.0
    encoder(torch.zeros(3, 3))
    assert encoder.rows == 3.0


def weights(tmp_path: Path, name: str, module: nn.Module, prefix: str = "") -> str:
    file = tmp_path / name
    state = {prefix + key: x for key, x in module.state_dict().items()}
    if name.endswith("safetensors"):
        safetensors.torch.save_file(state, file)
    else:
        torch.save({"state_dict": state, "epoch": torch.tensor(3)} if name == "nested.pt" else state, file)
    return str(file)


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "nested.pt"])
@pytest.mark.parametrize("prefix", ["", "actor.encoder.own.obs."])
def test_an_encoder_starts_from_a_file(tmp_path: Path, name: str, prefix: str) -> None:
    torch.manual_seed(7)
    made = Wide(VECTOR)
    net = ps.Net(encoder=Wide, encoder_weights=weights(tmp_path, name, made, prefix), encoder_freeze=True)
    agent: Any = ps.SAC(net=net).build(spec_of(VECTOR, BOX), 0).agent
    for body in (agent.actor, agent.critics, agent.target_critics):
        for key, x in body.encoder.own["obs"].state_dict().items():
            assert torch.equal(x, made.state_dict()[key])
        assert not any(p.requires_grad for p in body.encoder.parameters()) and not body.encoder.own["obs"].training


def test_frozen_encoders_stay_as_they_are_and_the_rest_learns() -> None:
    net = ps.Net(hidden=(16,), activation="relu", encoder=Pixels, encoder_freeze=True)
    start = ps.SAC(**SMALL, net=net).build(EnvSpec(IMAGE, LeafSpec("box", (1,), "float32", -1.0, 1.0)), seed=1)
    policy = trained(Dots, ps.SAC(**SELDOM, net=net))
    before, after = start.agent.state_dict(), policy.agent.state_dict()
    for name in before:
        if ".encoder." in name:
            assert torch.equal(before[name], after[name]), name
    assert not torch.equal(before["actor.out.weight"], after["actor.out.weight"])


def test_images_of_the_built_in_networks_load_and_freeze_too(tmp_path: Path) -> None:
    first: Any = ps.DQN().build(spec_of(IMAGE), 3).agent
    file = weights(tmp_path, "cnn.safetensors", first.online.encoder.images["0"])
    agent: Any = ps.DQN(net=ps.Net(encoder_weights=file, encoder_freeze=True)).build(spec_of(IMAGE), 4).agent
    assert torch.equal(
        agent.target.encoder.images["0"].convs[0].weight, first.online.encoder.images["0"].convs[0].weight
    )
    assert not any(p.requires_grad for p in agent.online.encoder.parameters())


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def refused(said: str, spec: Any = VECTOR, **given: Any) -> None:
        with pytest.raises(ConfigError, match=said) as error:
            ps.PPO(net=ps.Net(**given)).build(spec_of(spec), 0)
        assert "\n" not in str(error.value)

    wide = weights(tmp_path, "wide.safetensors", Wide(LeafSpec("box", (5,), "float32")))
    refused(
        r"does not fit Wide: size mismatch for layers.0.weight: .*\[32, 5\].*\[32, 3\]",
        encoder=Wide,
        encoder_weights=wide,
    )
    other = weights(tmp_path, "other.safetensors", nn.Linear(2, 2))
    refused(r"Missing key\(s\) in state_dict: .layers.0.weight.", encoder=Wide, encoder_weights=other)
    twice = {f"{at}.{k}": x.clone() for at in ("actor", "critic") for k, x in Wide(VECTOR).state_dict().items()}
    safetensors.torch.save_file(twice, tmp_path / "twice.safetensors")
    refused(
        "more than once, under 'actor.', 'critic.'", encoder=Wide, encoder_weights=str(tmp_path / "twice.safetensors")
    )
    refused("cannot be read", encoder=Wide, encoder_weights=str(tmp_path / "none.safetensors"))
    refused("cannot be read", encoder=Wide, encoder_weights=str(tmp_path / "none.pt"))
    (tmp_path / "text.pt").write_text("hello")
    refused("no file of weights", encoder=Wide, encoder_weights=str(tmp_path / "text.pt"))
    torch.save([1, 2], tmp_path / "list.pt")
    refused("holds list; expected a state dict", encoder=Wide, encoder_weights=str(tmp_path / "list.pt"))
    refused("net.encoder_freeze with no encoder", encoder_freeze=True)
    refused("one file for each", DICT, encoder={"camera": Pixels, "vector": Wide}, encoder_weights=wide)
    refused("no encoder of that key", DICT, encoder={"camera": Pixels}, encoder_weights={"vector": wide})
    bad = Wide(VECTOR)
    next(bad.parameters()).data.fill_(np.nan)
    refused("returned NaN", encoder=Wide, encoder_weights=weights(tmp_path, "nan.safetensors", bad))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_an_own_encoder_acts_alike_wherever_it_is_sampled(place: str) -> None:
    settings: dict[str, Any] = {
        "serial": ps.SerialSampler(T=8, B=4),
        "cpu": ps.CpuSampler(T=8, B=4, workers=2),
        "gpu": ps.GpuSampler(T=8, B=4, workers=2),
    }
    found: list[Agent] = []
    for name in ("serial", place):
        sampler = settings[name].build(Dots, 5)
        net = ps.Net(encoder=Pixels, hidden=(16,), recurrent="gru", recurrent_size=8, critic_recurrent="own")
        policy = ps.PPO(epochs=1, minibatch=16, net=net).build(sampler.spec, seed=5)
        sampler.initialize(policy.agent)
        for itr in range(3):
            ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
        sampler.shutdown()
        found.append(policy.agent)
    for a, b in zip(found[0].parameters(), found[1].parameters()):
        assert torch.equal(a, b)


def test_a_run_is_resumed_and_played_with_its_encoder(tmp_path: Path) -> None:
    file = weights(tmp_path, "start.safetensors", Wide(LeafSpec("box", (4,), "float32")))
    net = ps.Net(hidden=(), encoder="tests.agents.own.encoders:Wide", encoder_weights=file, activation="gelu")
    algo = ps.PPO(epochs=1, lr_scales={"encoder.*": 0.5}, net=net)

    def run(folder: str, steps: int) -> Any:
        return ps.RunConfig(steps=steps, dir=str(tmp_path / folder), progress="off", eval_episodes=1)

    sampler = ps.SerialSampler(T=16, B=4)
    whole = ps.train(ps.Experiment("CartPole-v1", algo, sampler=sampler, run=run("whole", 256)))
    ps.train(ps.Experiment("CartPole-v1", algo, sampler=sampler, run=run("part", 128)))
    Path(file).unlink()  # the checkpoint has them
    ps.resume(tmp_path / "part", {"run.steps": 256})
    first, second = (ps.load(str(tmp_path / name)) for name in ("whole", "part"))
    for a, b in zip(first.agent.parameters(), second.agent.parameters()):
        assert torch.equal(a, b)
    assert whole.metrics["train/n_updates"] > 0
