from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.envs.builtin import is_builtin_env
from penstock.envs.ids import is_simulator_id
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native import makes_vector_env
from penstock.run.presets import named_preset, with_preset
from penstock.tensor_envs import NextStep, from_rsl_rl
from tests.tensor_envs.sims import fake_jax, fakes

N = 5
GROUPED = {
    "mjlab:Mjlab-Ring": ("actor", "critic"),
    "isaaclab:Isaac-Ring-v0": ("policy", "critic"),
    "playground:GroupedRing": ("state", "privileged_state"),
    "rsl_rl": ("policy", "critic"),
}
ALL = [*GROUPED, "playground:Ring", "brax:Ring", "maniskill:ManiRing-v1"]
KNOWS_LENGTHS = [id_ for id_ in ALL if not id_.startswith("maniskill")]


@pytest.fixture(autouse=True)
def standins(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install(monkeypatch)
    fake_jax.install(monkeypatch)


def make(id_: str, num_envs: int = N, **kwargs: Any) -> Any:
    if id_ == "rsl_rl":
        return from_rsl_rl(fakes.VecEnv(num_envs), **kwargs)
    given = {"episode_length": fakes.LIMIT} if id_.startswith("brax") else {}
    return EnvConfig(id_, {"num_envs": num_envs, "device": "cpu", **given, **kwargs}).make()


def actions() -> list[torch.Tensor]:
    """For 11 steps; slot 1 terminates in step 2, slot 3 in step 3, which is its time limit as well."""
    made = torch.zeros(11, N, 1)
    made[2, 1] = made[3, 3] = 1.0
    return list(made)


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("id_", ALL)
def test_a_simulator_steps_as_the_ring_does_and_shows_what_its_episodes_ended_in(id_: str, seed: int):
    env, ring = make(id_), fakes.Ring(N)
    ring.restart(slice(None), seed)
    obs, _ = env.reset(seed=seed)
    assert torch.equal(obs, ring.obs())
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert env.observation_space.shape == (N, 3)
    assert env.action_space.shape == (N, 1)
    for action in actions():
        obs, reward, terminated, truncated, info = env.step(action)
        expected, over, cut = ring.advance(action)
        ended = over | cut
        final = ring.obs().clone()
        ring.restart(ended)
        assert torch.equal(obs, ring.obs())
        assert torch.equal(reward, expected)
        assert torch.equal(terminated, over)
        assert torch.equal(truncated, cut & ~over)
        if id_ == "rsl_rl":
            assert "final_obs" not in info
        elif ended.any():
            assert torch.equal(info["final_obs"][ended], final[ended])
            assert info["final_obs"].shape == final.shape
    assert getattr(env, "final_obs", None) == ("previous" if id_ == "rsl_rl" else None)
    env.close()
    assert fakes.CLOSED == [] if ":Ring" in id_ or "Grouped" in id_ else [id_.partition(":")[0]]


@pytest.mark.parametrize("id_", GROUPED)
def test_the_groups_that_were_asked_for_are_shown(id_: str):
    actor, critic = GROUPED[id_]
    env = make(id_, groups=[actor, critic])
    assert {key: space.shape for key, space in env.single_observation_space.items()} == {actor: (3,), critic: (1,)}
    obs, _ = env.reset(seed=3)
    assert obs.keys() == {actor, critic}
    for action in actions()[:4]:
        *_, info = env.step(action)
    if id_ != "rsl_rl":
        assert {key: x.shape for key, x in info["final_obs"].items()} == {actor: (N, 3), critic: (N, 1)}
    env.close()
    alone = make(id_, groups=critic)
    assert alone.single_observation_space.shape == (1,)
    alone.close()
    with pytest.raises(ConfigError, match=rf"no group 'nope'; expected env_kwargs groups= .*'{critic}'"):
        make(id_, groups=[actor, "nope"])


def test_an_observation_without_groups_has_none_to_choose():
    with pytest.raises(ConfigError, match="in no groups; leave it out"):
        make("playground:Ring", groups="state")


def test_the_group_of_the_actor_is_not_guessed():
    class Other(fakes.VecEnv):
        def get_observations(self) -> dict[str, torch.Tensor]:
            return self.ring.groups("proprio", "critic")

    with pytest.raises(ConfigError, match=r"no group actor or policy; expected env_kwargs groups= .*'proprio'"):
        from_rsl_rl(Other(N))
    assert from_rsl_rl(Other(N), groups="proprio").single_observation_space.shape == (3,)


@pytest.mark.parametrize("id_", KNOWS_LENGTHS)
def test_ages_bring_the_time_limit_nearer(id_: str):
    env = make(id_)
    env.reset(seed=3)
    env.set_ages(torch.tensor([0, 1, 2, 3, 99]))
    cut = [env.step(torch.zeros(N, 1))[3].tolist() for _ in range(4)]
    assert [[b for b in range(N) if row[b]] for row in cut] == [[3, 4], [2], [1], [0]]


def test_ages_count_steps_of_which_each_repeats_an_action():
    env = make("brax:Ring", action_repeat=2)
    env.reset(seed=3)
    env.set_ages(torch.tensor([0, 1, 0, 1, 0]))
    assert env.step(torch.zeros(N, 1))[3].tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("id_", [id_ for id_ in GROUPED if not id_.startswith("playground")])
def test_a_log_that_stands_for_longer_counts_once(id_: str):
    env = make(id_)
    env.reset(seed=3)
    logs = [env.step(torch.zeros(N, 1))[4].get("log") for _ in range(2 * fakes.LIMIT)]
    assert [bool(log) for log in logs] == ([False] * 3 + [True]) * 2
    assert float(logs[3]["Episode_Reward/track"]) == 0.5


def test_metrics_of_a_functional_simulator_are_averaged():
    env = make("playground:Ring")
    env.reset(seed=3)
    assert env.step(torch.zeros(N, 1))[4]["log"] == {"track": torch.tensor(0.5)}


def test_a_fresh_state_opens_each_episode_or_the_slots_first_one():
    for fresh, same in (("each", False), ("first", True)):
        env = make("playground:DrawnRing", fresh=fresh)
        first = env.reset(seed=3)[0].clone()
        for _ in range(fakes.LIMIT):
            obs = env.step(torch.zeros(N, 1))[0]
        assert torch.equal(obs, first) == same
    with pytest.raises(ConfigError, match=r"fresh='some'.*each"):
        make("playground:Ring", fresh="some")


def test_a_curriculum_goes_on_where_its_state_is_to_be_preserved():
    env = make("playground:Ring")
    env.reset(seed=3)
    for _ in range(fakes.LIMIT + 2):
        env.step(torch.zeros(N, 1))
    assert env._state.info["AutoResetWrapper_preserve_info"].tolist() == [fakes.LIMIT + 2] * N
    assert env._state.data[1].tolist() == [fakes.LIMIT + 2] * 99  # a buffer of all slots is no slot's


@pytest.mark.parametrize("id_", ["mjlab:Mjlab-Ring", "isaaclab:Isaac-Ring-v0"])
def test_settings_are_changed_by_their_paths(id_: str):
    assert make(id_, episode_length_s=7).env.cfg.episode_length_s == 7
    fakes.Simulation.one = None
    with pytest.raises(ConfigError, match=r"episode_lenght_s=7: it has no such setting; .*'episode_length_s'"):
        make(id_, episode_lenght_s=7)
    with pytest.raises(ConfigError, match=r"scene\.nope=7: it has no such setting"):
        make(id_, **{"scene.nope": 7})
    with pytest.raises(ConfigError, match=r"scene\.num_envs=7: it follows from sampler\.B"):
        make(id_, **{"scene.num_envs": 7})
    switch = "auto_reset" if id_.startswith("mjlab") else "compute_final_obs"
    with pytest.raises(ConfigError, match=rf"{switch}=7: (Fals|Tru)e, so that"):
        make(id_, **{switch: 7})


@pytest.mark.parametrize("id_", ["mjlab:Mjlab-Ring", "isaaclab:Isaac-Ring-v0"])
def test_actions_have_the_bounds_that_were_asked_for(id_: str):
    assert not make(id_).single_action_space.is_bounded()
    fakes.Simulation.one = None
    env = make(id_, action_bound=2.5)
    assert (env.single_action_space.low, env.action_space.high.shape) == (-2.5, (N, 1))
    fakes.Simulation.one = None
    with pytest.raises(ConfigError, match=r"action_bound=-1.0; expected a number above 0"):
        make(id_, action_bound=-1.0)


@pytest.mark.parametrize("name", ["sac/fast/mjlab"])
def test_a_preset_for_simulators_has_what_its_algorithm_needs(name: str):
    """SAC has no agent for actions without bounds, which are what a simulator has by default."""
    algo, env = name.split("/")[0], "mjlab:Mjlab-Ring"
    exp: Any = ps.override(with_preset(algo, env, named_preset(name)), {"sampler.B": N, "run.device": "cpu"})
    sampler = exp.sampler.build(exp.env_config, 0)
    exp.algo.build(sampler.spec)
    sampler.shutdown()


def test_settings_of_playground_are_changed_too():
    env = make("playground:Ring", episode_length=2)
    env.reset(seed=3)
    assert [bool(env.step(torch.zeros(N, 1))[3].all()) for _ in range(4)] == [False, True] * 2
    with pytest.raises(ConfigError, match=r"ctrl_td=1: no such setting; did you mean 'ctrl_dt'"):
        make("playground:Ring", ctrl_td=1)


@pytest.mark.parametrize("id_", ["mjlab:Mjlab-Ring", "isaaclab:Isaac-Ring-v0"])
def test_a_limit_that_is_part_of_the_task_terminates(id_: str):
    env = make(id_, is_finite_horizon=True)
    env.reset(seed=3)
    for _ in range(fakes.LIMIT):
        _, _, terminated, truncated, _ = env.step(torch.zeros(N, 1))
    assert terminated.all()
    assert not truncated.any()


def test_a_vec_env_without_time_outs_terminates_at_its_limit():
    vec = fakes.VecEnv(N)
    vec.finite = True
    env = from_rsl_rl(vec)
    env.reset(seed=3)
    for _ in range(fakes.LIMIT):
        _, _, terminated, truncated, _ = env.step(torch.zeros(N, 1))
    assert terminated.all()
    assert not truncated.any()


def test_a_log_whose_values_change_in_one_dict_counts_in_every_step():
    class OneDict(fakes.VecEnv):
        def step(self, action: torch.Tensor) -> Any:
            *answer, _ = super().step(action)
            log["steps"] = torch.tensor(float(log["steps"]) + 1.0)
            return *answer, {"log": log}

    log: dict[str, Any] = {"steps": 0.0}
    env = from_rsl_rl(OneDict(N))
    assert [float(env.step(torch.zeros(N, 1))[4]["log"]["steps"]) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_a_vec_env_itself_is_refused_with_what_wraps_it():
    with pytest.raises(ConfigError, match=r"gave .*VecEnv; .*penstock\.tensor_envs\.from_rsl_rl\(env\)$"):
        EnvConfig(fakes.VecEnv, {"num_envs": N}).make()


def test_from_rsl_rl_refuses_what_is_none():
    class Old(fakes.VecEnv):
        def get_observations(self) -> Any:
            return self.ring.obs(), {}

    with pytest.raises(ConfigError, match=r"it has no num_envs, .*expected a VecEnv of rsl_rl 5"):
        from_rsl_rl(object())
    with pytest.raises(ConfigError, match="is tuple; expected a TensorDict"):
        from_rsl_rl(Old(N))


def test_success_is_that_of_the_last_step_of_an_episode():
    env = make("maniskill:ManiRing-v1")
    env.reset(seed=3)
    assert [env.step(action)[4]["is_success"].tolist() for action in actions()[1:4]] == [
        [False] * N,
        [False, True, False, False, False],
        [False, False, False, True, False],
    ]


def test_isaac_lab_holds_one_simulation_and_publishes_final_observations(monkeypatch: pytest.MonkeyPatch):
    env = make("isaaclab:Isaac-Ring-v0")
    with pytest.raises(ConfigError, match=r"this process has a simulation.*run\.eval_in='training'"):
        make("isaaclab:Isaac-Ring-v0")
    env.close()
    make("isaaclab:Isaac-Ring-v0").close()
    utils = sys.modules["isaaclab_tasks.utils"]
    monkeypatch.setattr(utils, "parse_env_cfg", lambda task, device, num_envs: fakes.settings())
    with pytest.raises(ConfigError, match=r"this Isaac Lab has no compute_final_obs.*6219"):
        make("isaaclab:Isaac-Ring-v0")


def test_next_step_says_that_mjlab_refuses_it():
    env = make("mjlab:Mjlab-Ring").env
    with pytest.raises(ConfigError, match=r"mjlab refuses a further step .*env='mjlab:TASK'"):
        NextStep(env, lambda slots: env.reset(env_ids=slots)[0])


@pytest.mark.parametrize(
    ("id_", "package", "bring"),
    [
        ("mjlab:Mjlab-Ring", "mjlab", "pip install mjlab"),
        ("isaaclab:Isaac-Ring-v0", "isaaclab", "Isaac Lab 3 and Isaac Sim: https://isaac-sim"),
        ("maniskill:ManiRing-v1", "mani_skill", "pip install mani-skill"),
        ("playground:Ring", "mujoco_playground", "pip install playground"),
        ("brax:Ring", "brax", "pip install brax"),
    ],
)
def test_a_simulator_that_is_not_installed_says_what_brings_it(
    id_: str, package: str, bring: str, monkeypatch: pytest.MonkeyPatch
):
    for name in [x for x in sys.modules if x == package or x.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"env='{id_}': .*{package}.*; it comes with: {bring}"):
        make(id_)


@pytest.mark.parametrize(
    "id_", ["mjlab:Mjlab-Rnig", "playground:Rnig", "brax:Rnig", "isaaclab:Isaac-Rnig-v0", "maniskill:ManiRnig-v1"]
)
def test_an_unknown_task_is_named(id_: str):
    with pytest.raises(ConfigError, match=f"unknown environment id '{id_}'"):
        make(id_)


@pytest.mark.parametrize("id_", ["mjlab:", "isaaclab:os:Id-v0"])
def test_a_task_is_one_name(id_: str):
    with pytest.raises(ConfigError, match=r"expected \w+:TASK, the name of one of its tasks"):
        make(id_)


def test_jax_must_have_the_device():
    with pytest.raises(ConfigError, match=r"device='cuda:1'.*Unknown backend gpu; JAX finds"):
        make("playground:Ring", device="cuda:1")


def test_an_id_is_known_to_be_of_a_batched_environment():
    assert is_simulator_id("mjlab:Mjlab-Ring")
    assert not is_simulator_id("mjlab")
    assert makes_vector_env(EnvConfig("isaaclab:Nothing"))  # none is made to find out
    assert is_builtin_env("mjlab:Mjlab-Ring")


def test_one_is_made_for_all_slots_and_none_to_look_at(monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []

    class Counted(fakes.MjlabEnv):
        def __init__(self, cfg: Any, device: str) -> None:
            super().__init__(cfg, device)
            made.append(cfg.scene.num_envs)

    monkeypatch.setattr(sys.modules["mjlab.envs"], "ManagerBasedRlEnv", Counted)
    ps.SerialSampler(T=4, B=N).build("mjlab:Mjlab-Ring").shutdown()
    assert made == [N]


def test_slots_and_device_are_those_of_the_run():
    run = ps.RunConfig(steps=64, device="cpu")
    exp = ps.Experiment("mjlab:Mjlab-Ring", ps.PPO(), ps.SerialSampler(T=4, B=N), run, env_kwargs={"groups": "actor"})
    assert exp.env_config.kwargs == {"device": "cpu", "groups": "actor"}
    other = ps.Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler(), run, eval_env="mjlab:Mjlab-Ring")
    assert (other.env_config.kwargs, other.eval_env_config.kwargs) == ({}, {"device": "cpu"})
    own = ps.Experiment("mjlab:Mjlab-Ring", ps.PPO(), ps.SerialSampler(), run, env_kwargs={"device": "cuda"})
    assert own.eval_env_config.kwargs == {"device": "cuda"}


@pytest.mark.parametrize("id_", ALL)
def test_a_batch_holds_the_last_observations(id_: str):
    T = 11
    env: Any = id_ if id_ != "rsl_rl" else (lambda num_envs: from_rsl_rl(fakes.VecEnv(num_envs)))
    kwargs = {"episode_length": fakes.LIMIT} if id_.startswith("brax") else {}
    kwargs |= {} if id_ == "rsl_rl" else {"device": "cpu"}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sampler = ps.SerialSampler(T=T, B=N).build(EnvConfig(env, kwargs), seed=0)
        sampler.initialize(ps.PPO().build(sampler.spec, 0).agent)
        ends = 0
        for itr in range(2):
            batch, _ = sampler.obtain_samples(itr)
            ended = batch.terminated | batch.truncated
            after = batch.obs[:-1].roll(1, -1)
            assert torch.equal(batch.obs[1:][~ended], after[~ended])
            assert torch.equal(batch.final[ended], (batch.obs[:-1] if id_ == "rsl_rl" else after)[ended])
            assert batch.valid.all()
            ends += int(batch.truncated.sum())
    assert ends
    assert [str(x.message) for x in said if "as rsl_rl does" in str(x.message)] == [str(x.message) for x in said]
    assert len(said) == (id_ == "rsl_rl")  # once, at the first end
    sampler.shutdown()
