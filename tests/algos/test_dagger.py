"""DAgger: the mixture and the labels by hand, the expert's answers on a probe, and experts that do not fit."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.agents.parameters import parameters_digest, parameters_of, tensors_of
from penstock.algos.dagger import GuidedAgent
from penstock.core.batch import Inputs
from penstock.core.spec import LeafSpec
from penstock.envs.toy import Match, TMaze
from penstock.envs.toy.agents import TeamBits
from penstock.learn.rows.postprocess import as_tensors
from penstock.run.files.foreign import foreign
from tests.algos.taught import SMALL, TaughtDAgger
from tests.samplers.placed import PLACES, differences, run
from tests.slow import slow

SPEC = ps.EnvSpec(LeafSpec("box", (1,), "float32"), LeafSpec("box", (1,), "float32", low=-1.0, high=1.0))
QUIET: dict[str, Any] = {"progress": "off", "eval_episodes": 1}
LSTM = ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=8)


class Says(ps.Agent):
    """Acts by a number plus its first uniform, and remembers how often it has acted."""

    def __init__(self, number: float, uniforms: int, memory: bool = False) -> None:
        super().__init__()
        self.number, self.memory = torch.nn.Parameter(torch.tensor(number)), memory
        self.spec, self.noise_size, self.fed = SPEC, uniforms, frozenset()

    def initial_state(self, B: int) -> Any:
        return torch.zeros(B) if self.memory else None

    def act(self, inputs: Inputs, state: Any, noise: Any) -> Any:
        said = self.number.detach() + (state if self.memory else 0.0) + torch.zeros(len(inputs.first), 1)
        said = said.diagonal().unsqueeze(1) if self.memory else said
        action = said if noise is None else said + noise[:, :1]
        return action, {"logp": action[:, 0]}, None if state is None else state + 1.0

    def forward(self, inputs: Inputs, state: Any = None) -> Any: ...


def guided(memory: bool = False) -> GuidedAgent:
    agent = GuidedAgent(Says(10.0, 1))
    agent.__dict__["expert"] = Says(-10.0, 3, memory)
    return agent


def rows(n: int) -> Inputs:
    return Inputs(torch.zeros(n, 1), torch.zeros(n, 1), torch.zeros(n), torch.zeros(n, dtype=torch.bool))


def test_the_mixture_by_hand() -> None:
    """The last uniform says who acts, by beta; the label is the expert's without noise, whoever does."""
    agent = guided()
    agent.beta.fill_(0.5)
    noise = torch.tensor([[0.25, 0.4], [0.75, 0.6], [0.5, 0.5]])
    action, info, state = agent.act(rows(3), None, noise)
    assert action.squeeze(1).tolist() == [-10.0, 10.75, 10.5]
    assert info["expert"].squeeze(1).tolist() == [-10.0] * 3
    assert state is None
    assert agent.act(rows(1), None, None)[0].item() == 10.0
    assert agent.exported() is agent.learner


def test_a_slots_number_stays_the_last_of_the_noise() -> None:
    learner = Says(10.0, 2)
    learner.env_ranks = True
    agent = GuidedAgent(learner)
    agent.__dict__["expert"] = Says(-10.0, 0)
    agent.beta.fill_(0.5)
    seen: list[Any] = []
    learner.act = lambda inputs, state, noise: (seen.append(noise), Says.act(learner, inputs, state, noise))[1]  # pyright: ignore
    action, _, _ = agent.act(rows(2), None, torch.tensor([[0.25, 0.4, 0.0], [0.25, 0.6, 1.0]]))
    assert action.squeeze(1).tolist() == [-10.0, 10.25]
    assert seen[0].tolist() == [[0.25, 0.0], [0.25, 1.0]]


def test_learner_and_expert_go_where_the_agent_goes() -> None:
    agent = guided()
    agent.double()
    assert agent.expert is not None
    assert {x.dtype for part in (agent.learner, agent.expert) for x in part.parameters()} == {torch.float64}
    assert set(ps.DAgger(net=SMALL).build(SPEC).agent.norm_groups()) == {"actor", "critic"}


def test_guide_and_learner_hold_one_state_and_so_do_their_copies() -> None:
    policy = TaughtDAgger(net=SMALL).build(SPEC)
    agent: Any = policy.agent
    hooked: list[Any] = []
    agent.learner.register_load_state_dict_pre_hook(lambda module, *_: hooked.append(module))
    noise, probe = torch.full((2, agent.noise_size), 0.25), rows(2)
    for other in (copy.deepcopy(agent), cloudpickle.loads(cloudpickle.dumps(agent))):
        before = [x.clone() for x in agent.state_dict().values()]
        assert other.state_dict().keys() == other.learner.state_dict().keys() == agent.state_dict().keys()
        assert torch.equal(other.act(probe, None, noise)[0], agent.act(probe, None, noise)[0])
        other.load_state_dict({name: x + 1.0 for name, x in agent.state_dict().items()}, assign=True)
        assert [id(x) for x in other.parameters()] == [id(x) for x in other.learner.parameters()]
        assert not torch.equal(other(probe).value, agent(probe).value) and other.taught
        assert torch.equal(other(probe).value, other.learner(probe, None).value) and other.expert is not agent.expert
        assert all(torch.equal(x, y) for x, y in zip(before, agent.state_dict().values(), strict=True))
    agent.load_state_dict(agent.state_dict())
    assert hooked[-1] is agent.learner and len({id(x) for x in parameters_of(agent).values()}) == len(tensors_of(agent))


def test_every_member_of_an_agent_is_the_learners_or_needs_no_learner() -> None:
    """Those of actors and critics ask `preparation`, which is the learner's; only losses without replay ask the rest."""
    asked = {
        "prepared",
        "for_critic",
        "mask",
        "unless_stuck",
        "scaled_reward",
        "values",
        "needs_statistics",
        "central",
        "outer_parts",
    }
    acting = {"by_kernel", "evaluates_with_noise"}
    members = {name for name in {*vars(ps.Agent), *ps.Agent.__annotations__} if not name.startswith("_")}
    assert members - {*vars(GuidedAgent), *vars(GuidedAgent(Says(10.0, 1)))} == asked | acting


def test_noise_of_a_noisy_learner_is_renewed() -> None:
    class Noisy(Says):
        def renew_noise(self, rng: np.random.Generator) -> None:
            self.number.data.fill_(3.0)

    agent = GuidedAgent(Noisy(1.0, 1))
    agent.renew_noise(np.random.default_rng(0))
    assert agent.is_noisy and agent.number.item() == 3.0 and not GuidedAgent(Says(1.0, 1)).is_noisy  # pyright: ignore


@pytest.mark.usefixtures("forked")
def test_workers_that_were_started_without_the_expert_say_so() -> None:
    """Their labels would be null actions."""
    algo = ps.DAgger(net=SMALL)
    sampler, policy = live(algo, Match, settings=ps.CpuSampler(8, 4, workers=2))
    algo.teach(policy, ps.PPO(net=SMALL).build(sampler.spec))
    with pytest.raises(ps.PenstockError, match=r"DAgger was taught after sampler\.initialize"):
        sampler.obtain_samples(0)
    sampler.shutdown()


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_beta_0_and_1_are_one_of_them(beta: float) -> None:
    agent = guided()
    agent.beta.fill_(beta)
    action, _, _ = agent.act(rows(2), None, torch.tensor([[0.25, 2.0**-24], [0.25, 1.0 - 2.0**-24]]))
    assert action.squeeze(1).tolist() == [[10.25, -10.0][int(beta)]] * 2


def test_beta_follows_its_schedule() -> None:
    policy = ps.DAgger(beta="linear(1, 0, 0.5)", net=SMALL).build(SPEC)
    found = []
    for progress in (0.0, 0.25, 0.5, 1.0):
        policy.set_progress(progress)
        found.append(policy.agent.beta.item())  # pyright: ignore
    assert found == [1.0, 0.5, 0.0, 0.0]


def test_its_parameters_are_those_of_bc() -> None:
    bc, policy = ps.BC(net=SMALL).build(SPEC, seed=3), ps.DAgger(net=SMALL).build(SPEC, seed=3)
    ours, theirs = policy.agent.state_dict(), bc.agent.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    ps.PPO(net=SMALL, normalize_value=False).build(SPEC).load_parameters(ours)  # goes on online


def live(algo: Any, env: Any, T: int = 8, B: int = 4, settings: Any = None) -> tuple[Any, Any]:
    sampler = (settings or ps.SerialSampler(T, B)).build(env, 3)
    policy = algo.build(sampler.spec, seed=3)
    policy.prepare(sampler.batch_spec, sampler.initialize(policy.agent)["info"])
    return sampler, policy


@pytest.mark.parametrize("net", [SMALL, LSTM])
def test_labels_are_the_experts_answers_in_every_state_visited(net: ps.Net) -> None:
    """Also of one with memory, which remembers what the learner did."""
    algo = TaughtDAgger(beta=0.3, expert_net=net, net=SMALL)
    sampler, policy = live(algo, TMaze)
    expert = ps.PPO(net=net).build(sampler.spec, seed=7).agent
    state = expert.initial_state(4)
    for itr in range(3):
        batch, _ = sampler.obtain_samples(itr)
        x = as_tensors(batch, policy.device)
        for t in range(8):
            row = Inputs(*(None if part is None else part[t] for part in x.inputs_t))
            action, _, state = expert.act(row, state, None)
            at = x.valid[t]
            assert torch.equal(x.info["expert"][t][at], action[at])
        ps.train_one_step(policy, batch)


def test_the_replay_keeps_every_label_and_no_reset_row() -> None:
    algo = TaughtDAgger(beta=1.0, net=SMALL, batch_size=8, learning_starts=1000)
    sampler, policy = live(algo, Match)
    kept = 0
    for itr in range(3):
        batch, _ = sampler.obtain_samples(itr)
        kept += int(batch.valid.sum())
        ps.train_one_step(policy, batch)
    replay = policy.replay_schedule.replay
    assert len(replay) == kept
    assert not any(x.requires_grad for x in policy.agent.expert.parameters())
    x = replay.sample(64, np.random.default_rng(0))[1]
    expert = ps.PPO(net=SMALL).build(sampler.spec, seed=7).agent
    with torch.no_grad():
        seen = Inputs(torch.from_numpy(x.inputs.obs), None, None, torch.zeros(64, dtype=torch.bool))  # pyright: ignore
        assert x["action"].tolist() == expert.act(seen, None, None)[0].tolist()
    assert set(x.rows) == {"action"}


def test_it_answers_as_its_expert_does_on_a_probe() -> None:
    """Of `Match`, whose two observations an expert answers by 1 and 0: agreement is exact, and the return is 1."""
    expert = ps.PPO(lr=1e-2, epochs=4, minibatch=64, net=SMALL)
    sampler, teacher = live(expert, Match, 32, 8)
    for itr in range(12):
        ps.train_one_step(teacher, sampler.obtain_samples(itr)[0])
    assert [int(teacher.predict(np.float32([x]))) for x in (-1, 1)] == [0, 1]
    algo = ps.DAgger(lr=1e-2, beta="linear(1, 0)", net=SMALL)
    sampler = ps.SerialSampler(8, 4).build(Match, 3)
    policy = algo.build(sampler.spec, seed=3)
    algo.teach(policy, teacher)
    policy.prepare(sampler.batch_spec, sampler.initialize(policy.agent)["info"])
    for itr in range(20):
        policy.set_progress(itr / 20)
        metrics = ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert sampler.evaluate_agent(0, 16).mean_return == 1.0
    assert metrics["train/neglogp"] < 0.1


def expert_run(path: Path, env: Any = Match, algo: Any = None, seed: int = 0) -> str:
    algo = algo or ps.PPO(epochs=1, net=SMALL)
    ps.train(ps.Experiment(env, algo, ps.SerialSampler(T=8, B=4), ps.RunConfig(32, seed=seed, dir=path, **QUIET)))
    return str(path)


EXPERTS: dict[str, Any] = {
    "memory": ps.PPO(epochs=1, net=replace(LSTM, normalize_obs=True)),
    "dqn": ps.DQN(learning_starts=4, batch_size=4, net=SMALL, distributional="c51", noisy=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPERTS)
def test_a_run_resumes_bit_for_bit_from_any_expert_and_plays_without_it(kind: str, tmp_path: Path) -> None:
    algo = ps.DAgger(expert=expert_run(tmp_path / "expert", algo=EXPERTS[kind]), batch_size=8, net=SMALL)

    def exp(name: str, steps: int) -> ps.Experiment:
        return ps.Experiment(Match, algo, ps.SerialSampler(T=8, B=4), ps.RunConfig(steps, dir=tmp_path / name, **QUIET))

    whole = ps.train(exp("whole", 64)).policy
    ps.train(exp("halves", 32))
    halves = ps.resume(str(tmp_path / "halves"), {"run.steps": 64}).policy
    for x, y in zip(whole.agent.state_dict().values(), halves.agent.state_dict().values()):  # pyright: ignore
        assert torch.equal(x, y)
    shutil.move(tmp_path / "expert", tmp_path / "elsewhere")
    assert ps.load(tmp_path / "whole").predict(np.ones(1, np.float32)) in (0, 1)
    with pytest.raises(ps.CheckpointError, match="expert is no run directory"):
        ps.resume(str(tmp_path / "halves"), {"run.steps": 96})
    expert_run(tmp_path / "expert", algo=EXPERTS[kind], seed=1)
    with pytest.raises(
        ps.CheckpointError, match=r"the expert is .* and the checkpoint was written with .* has changed"
    ):
        ps.resume(str(tmp_path / "halves"), {"run.steps": 96})


@pytest.mark.slow
def test_agents_of_a_run_are_taught_by_those_of_another_and_runners_have_experts_too(tmp_path: Path) -> None:
    expert = expert_run(tmp_path / "e", TeamBits)
    exp = ps.Experiment(TeamBits, ps.DAgger(expert=expert, net=SMALL), ps.SerialSampler(T=8, B=2))
    policy = ps.train(replace(exp, run=ps.RunConfig(32, dir=tmp_path / "d", **QUIET))).policy["shared"]  # pyright: ignore
    runner = ps.EnvRunner(exp)
    digest = parameters_digest(ps.load(expert)["shared"].agent)
    for agent in (policy.agent, runner.policy["shared"].agent):  # pyright: ignore
        assert parameters_digest(agent.expert) == digest
    runner.close()


def test_a_strangers_settings_that_name_an_expert_name_a_file() -> None:
    assert foreign({"expert": "runs"}) == ["expert='runs' (a file)"]


def test_a_state_that_another_expert_has_labelled_is_refused() -> None:
    algo = TaughtDAgger(net=SMALL)
    state = algo.build(SPEC).state_dict()
    algo.build(SPEC, seed=1).load_state_dict(state)
    other = ps.DAgger(net=SMALL).build(SPEC)
    with pytest.raises(ps.CheckpointError, match=r"the teacher is missing, and the checkpoint was written with \w{12}"):
        other.load_state_dict(state)
    algo.teach(other, ps.PPO(net=SMALL).build(SPEC, seed=8))
    with pytest.raises(
        ps.CheckpointError, match=r"the expert is \w{12}, and .* with \w{12} \(sha256\): it has changed"
    ):
        other.load_state_dict(state)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("place", ["cpu-2", *slow("gpu-2", "alternating-2", "async-cpu-0")])
def test_every_sampler_has_the_same_bits(place: str) -> None:
    """With an expert that remembers."""
    algo = TaughtDAgger(beta=0.5, expert_net=replace(LSTM, prev_action=True), net=SMALL, batch_size=16)
    batches, parameters = run(ps.SerialSampler(8, 5), TMaze, algo, 3)
    there, parameters_there = run(PLACES[place](8, 5), TMaze, algo, 3)
    assert differences(batches, there) == []
    assert parameters == parameters_there


def refused(algo: Any, env: Any = Match) -> None:
    ps.train(ps.Experiment(env, algo, ps.SerialSampler(T=8, B=2), ps.RunConfig(16, **QUIET)))


def test_what_does_not_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(
        ps.ConfigError, match=r"DAgger with expert='', so there is nothing to imitate.*--algo.expert PATH"
    ):
        refused(ps.DAgger())
    with pytest.raises(ps.CheckpointError, match="missing is no run directory"):
        refused(ps.DAgger(expert=str(tmp_path / "missing")))
    run = expert_run(tmp_path / "e")
    with pytest.raises(
        ps.ConfigError, match=r"the expert has other spaces than the environment: shape of obs is \(1,\)"
    ):
        refused(ps.DAgger(expert=run), "CartPole-v1")
    with pytest.raises(ps.ConfigError, match="the expert has other spaces than the environment: kind of action"):
        refused(
            ps.DAgger(expert=expert_run(tmp_path / "p", "Pendulum-v1")),
            ps.EnvConfig("Pendulum-v1", wrappers=(discrete,)),
        )
    one = ps.PPO(epochs=1, net=SMALL)
    two = expert_run(tmp_path / "two", TeamBits, ps.Policies({"a": one, "b": one}, {"agent_0": "a", "agent_1": "b"}))
    with pytest.raises(ps.ConfigError, match=r"has the policies a, b; expected 'shared' .*--policy ID --out"):
        refused(ps.DAgger(expert=two))
    weights = next((tmp_path / "e").rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ps.CheckpointError, match=r"no good checkpoint in .*its manifest says"):
        refused(ps.DAgger(expert=run))
    with pytest.raises(ps.ConfigError, match="an expert may have memory, the learner not"):
        ps.DAgger(net=LSTM)
    with pytest.raises(ps.ConfigError, match="all labels count alike"):
        ps.DAgger(replay=ps.ReplaySettings(index="prioritized"))
    with pytest.raises(ps.ConfigError, match="the expert is a str; expected the Policy"):
        ps.DAgger(net=SMALL).teach(ps.DAgger(net=SMALL).build(SPEC), "runs/a")
    sampler, policy = live(ps.DAgger(net=SMALL, batch_size=4), Match)
    with pytest.raises(ps.ConfigError, match=r"DAgger has no expert.*algo.teach\(policy, ps.load"):
        ps.train_one_step(policy, sampler.obtain_samples(0)[0])


def discrete(env: Any) -> Any:
    import gymnasium as gym

    return gym.wrappers.TransformAction(env, lambda a: np.float32([a - 1.0]), gym.spaces.Discrete(3))
