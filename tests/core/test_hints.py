"""Hints at settings: every constructor name of other libraries, and every setting of ours given to another class."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.algos import find_algo
from penstock.core.config import known_names
from penstock.core.errors import ConfigError
from penstock.core.names.hints import foreign, hint, meaning_of, settings_classes, settings_of, table
from penstock.learn.settings import Settings

PEER_NAMES = Path(__file__).parent / "peer_names.txt"
OURS = settings_classes()
CLASSES = [cls for classes in OURS.values() for cls in classes]


def peer_names() -> list[str]:
    lines = PEER_NAMES.read_text().splitlines()
    return sorted({name for line in lines if line[:1] not in ("#", "[") for name in line.split()})


def test_every_public_class_of_settings_is_known_to_the_hints() -> None:
    public = {cls for name in ps.__all__ if isinstance(cls := getattr(ps, name), type)}
    ours = {f"{cls.__module__}:{cls.__name__}" for cls in public if cls.__new__ in (known_names, ps.PPO.__new__)}
    assert ours == {f"{cls.__module__}:{cls.__name__}" for cls in CLASSES}


def entries() -> Iterator[tuple[str, str, Any]]:
    for part, values in table().items():
        if part not in ("algorithms", "names", "members"):
            yield from ((part, name, meaning_of(value)) for name, value in values.items())


def test_every_path_of_the_table_is_a_setting_and_no_name_is_one_of_the_class_at_hand() -> None:
    bases = {base.__name__ for cls in CLASSES for base in cls.__mro__}
    for part, name, meaning in entries():
        assert part == "any" or part in bases, part
        where, _, leaf = meaning.path.rpartition(".")
        if meaning.path and where != "sampler.inner":
            assert any(leaf in settings_of(cls) for cls in OURS[where]), (part, name, meaning.path)
        assert meaning.path or " " in meaning.note, (part, name)
    assert all(name not in settings_of(cls) for part, name, _ in entries() for cls in CLASSES if cls.__name__ == part)


def test_a_name_of_another_library_is_answered_by_the_table_by_a_setting_of_that_name_or_by_no_setting() -> None:
    """857 names of eight libraries, given to classes of ours: none is answered by what it merely resembles."""
    names = peer_names()
    assert len(names) > 800
    algos = (ps.PPO, ps.A2C, ps.DQN, ps.R2D1, ps.SAC, ps.TD3, ps.CQL)
    different = (*algos, ps.CpuSampler, ps.RunnerSampler, ps.RunConfig, ps.Experiment, ps.EnvConfig, ps.Net)
    guessed = [
        (cls.__name__, name, said)
        for cls in different
        for name in names
        if name not in settings_of(cls) and (said := hint(name, cls)).startswith("did you mean")
    ]
    assert not guessed


def test_a_setting_of_ours_given_to_another_class_is_answered_with_its_owners() -> None:
    """Each setting given to each class without it, but for those that other libraries have, judged in the table."""
    wrong: list[tuple[str, str, str]] = []
    pairs = 0
    for at, owners in OURS.items():
        for owner in owners:
            for name in settings_of(owner):
                for cls in (cls for cls in CLASSES if name not in settings_of(cls)):
                    said, pairs = hint(name, cls), pairs + 1
                    named = f"ps.{owner.__name__}" in said or (at == "algo" and "every algorithm" in said)
                    if not named and foreign(name, [cls]) is None:
                        wrong.append((cls.__name__, name, said))
    assert pairs > 5_000
    assert not wrong, wrong[:10]


@pytest.mark.parametrize(
    ("cls", "name", "right"),
    [
        (ps.PPO, "clip_range_vf", "it is 'value_clip' here (--algo.value_clip): in units of normalize_value"),
        (ps.PPO, "vf_clip_param", "it is 'value_clip' here (--algo.value_clip): of a change of the value"),
        (ps.PPO, "desired_kl", "it is 'lr' here (--algo.lr): 'kl(1e-3, desired=0.01)'"),
        (ps.TQC, "top_quantiles_to_drop_per_net", "it is 'drop' here (--algo.drop)"),
        (ps.PPO, "kl_coeff", "no KL penalty here: target_kl"),
        (ps.PPO, "use_sde", "`use_sde` is a setting of ps.Net: net.use_sde, `--algo.net.use_sde`"),
        (ps.PPO, "anneal_lr", "it is 'lr' here (--algo.lr): a schedule anneals it"),
        (
            ps.PPO,
            "num_minibatches",
            "'minibatch' here (--algo.minibatch): a size here, sampler.T * sampler.B / num_min",
        ),
        (ps.A2C, "num_minibatches", "no minibatches in A2C"),
        (ps.PPO, "train_batch_size", "a batch is sampler.T * sampler.B rows"),
        (ps.DQN, "train_batch_size", "it is 'batch_size' here"),
        (ps.PPO, "num_learners", "it is 'learners' of ps.RunConfig here (--run.learners)"),
        (ps.PPO, "evaluation_interval", "it is 'eval_interval' of ps.RunConfig here (--run.eval_interval)"),
        (ps.PPO, "framework", "there is PyTorch only"),
        (ps.PPO, "env", "the environment is the first argument of ps.Experiment (--env)"),
        (ps.PPO, "policy", "networks are settings, net=ps.Net(...)"),
        (ps.PPO, "n_steps", "it is 'T' of ps.SerialSampler, "),
        (ps.DQN, "n_steps", "it is 'n_step' here"),
        (ps.RunConfig, "n_steps", "it is 'steps' here"),
        (ps.RunConfig, "best_model_save_path", "the best checkpoint is kept in the run's directory"),
        (ps.PPO, "ent_coef", "it is 'entropy_coef' here"),
        (ps.SAC, "ent_coef", "it is 'alpha' here"),
        (ps.SAC, "twin_q", "it is 'critics' here"),
        (ps.SAC, "action_noise", "no noise on actions here"),
        (ps.TD3, "action_noise", "it is 'exploration_noise' here"),
        (ps.TD3, "policy_noise", "it is 'target_noise' here"),
        (ps.R2D1, "batch_T", "it is 'train_length' here"),
        (ps.PPO, "batch_T", "it is 'T' of ps.SerialSampler, "),
        (ps.PPO, "stats_window_size", "nothing to set"),
        (ps.PPO, "gae_lamda", "did you mean 'gae_lambda'?"),
        (ps.PPO, "zzz", "known: adam_eps, "),
        (ps.ReplaySettings, "log_dir", "it is 'dir' of ps.RunConfig here (--run.dir)"),
        (ps.Experiment, "learners", "`learners` is a setting of ps.RunConfig: run.learners, `--run.learners`"),
        (ps.RunConfig, "wrappers", "`wrappers` is a setting of ps.Experiment (`--wrappers`) and of ps.EnvConfig"),
        (
            ps.RunnerSampler,
            "workers",
            "ps.NoOverlapAlternatingSampler: sampler.inner.workers, `--sampler.inner.workers`",
        ),
        (ps.Policies, "clip", "`clip` is a setting of ps.APPO, ps.GAIL, ps.MAPPO, ps.PPO"),
    ],
)
def test_names_by_hand(cls: type, name: str, right: str) -> None:
    with pytest.raises(ConfigError) as refused:
        cls(**{name: 4})
    assert f"{cls.__name__} has no setting {name!r}; " in str(refused.value)
    assert right in str(refused.value)


def test_every_algorithm_of_the_table_is_ours_and_every_class_named_there_too() -> None:
    for name, value in table()["algorithms"].items():
        meaning = meaning_of(value)
        assert not meaning.path or find_algo(meaning.path), name
    for name, said in table()["names"].items():
        assert name not in ps.__all__
        assert not said.startswith("ps.") or hasattr(ps, re.findall(r"\w+", said)[1]), said


MEMBERS = {
    "learn": "ps.train(ps.Experiment(env, ps.SAC(...), run=ps.RunConfig(steps=100_000)))",
    "train": "ps.train(ps.Experiment(env, ps.SAC(...)",
    "fit": "ps.train(ps.Experiment(env, ps.SAC(...)",
    "predict": "ps.load(run_dir).predict(obs)",
    "evaluate": "ps.evaluate(policy, env)",
    "save": ".policy.save('policy.safetensors')",
    "load": "ps.load(run_dir)",
}


@pytest.mark.parametrize("name", table()["members"])
def test_methods_of_other_libraries_algorithms_are_answered_on_settings_and_their_class(name: str) -> None:
    for holder in (ps.SAC, ps.SAC()):
        with pytest.raises(AttributeError, match=rf"^SAC has no '{name}'; ps\.SAC\(\.\.\.\) is settings: ") as told:
            getattr(holder, name)
        assert MEMBERS[name] in str(told.value) and not hasattr(holder, name)
    assert all(hasattr(ps, word) for word in re.findall(r"ps\.(\w+)", str(told.value)))


def test_a_type_checker_sees_none_of_them() -> None:
    """Else it takes `ps.PPO().learn(...)` for one that never returns, and reports nothing."""
    (cls,) = (x for x in ast.parse(inspect.getsource(Settings)).body if isinstance(x, ast.ClassDef))
    (guard,) = (x for x in cls.body if "Elsewhere" in ast.unparse(x))
    assert isinstance(guard, ast.If) and ast.unparse(guard.test) == "not TYPE_CHECKING"


def test_a_method_or_setting_of_ones_own_stands_before_the_answer() -> None:
    @dataclass(frozen=True)
    class Own(ps.PPO):
        load: float = 2.0

        def save(self) -> int:
            return 3

    assert (Own().load, Own(load=1.0).load, Own().save()) == (2.0, 1.0, 3)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("AsyncRl", "it is ps.train with a sampler that runs ahead: ps.AsyncCpuSampler"),
        ("PPOConfig", "it is ps.PPO"),
        ("RecurrentPPO", "it is ps.PPO: with net=ps.Net(recurrent='lstm')"),
        ("RolloutWorker", "it is ps.EnvRunner"),
        ("TrajInfo", "it is ps.Episodes holds"),
        ("Callbacks", "a function of each iteration, ps.RunConfig(each="),
        ("LearnerGroup", "it is ps.RunConfig(learners=...)"),
        ("from_checkpoint", "it is ps.resume(run_dir) to go on"),
        ("register_env", "nothing to register"),
        ("VecNormalize", "it is ps.Net(normalize_obs=True"),
        ("TRPO", "no TRPO here"),
        ("learners", "`learners` is a setting of ps.RunConfig"),
        ("PP0", "did you mean 'PPO'?"),
        ("Frobnicator", "dir(penstock) lists its names"),
    ],
)
def test_public_names_of_other_libraries(name: str, right: str) -> None:
    with pytest.raises(AttributeError) as refused:
        getattr(ps, name)
    assert f"module 'penstock' has no {name!r}; {right}" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("PPO", "did you mean 'ppo'?"),
        ("Discrete_SAC", "did you mean 'discrete-sac'?"),
        ("PPOConfig", "it is 'ppo' here"),
        ("QRDQN", "it is 'dqn' here: with distributional='quantile'"),
        ("dreamerv3", "no model-based algorithm here"),
        ("trpo", "no TRPO here"),
        ("pppo", "did you mean 'appo' or 'ppo'?"),
        ("frobnicate", "known: a2c, appo"),
    ],
)
def test_algorithms_of_other_libraries_on_the_command_line(name: str, right: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_algo(name)
    assert f"unknown algorithm {name!r}; {right}" in str(refused.value)
