"""Options of `penstock train` as the experiment that they mean, for `train` and for each run of `launch`."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.cli.settings import experiment, seed_list, train_parser


def meant(*options: str) -> Any:
    args, rest = train_parser().parse_known_args(["--env", "CartPole-v1", "--preset", "none", *options])
    return experiment("ppo", args, rest)[0]


def test_settings_lie_over_the_samplers_own_and_the_batch_over_both() -> None:
    exp = meant("--sampler", "cpu", "--sampler.B", "6", "--algo.lr", "1e-2", "--env-kwargs", "x=1", "--info-keys", "k")
    assert exp.sampler == ps.CpuSampler(T=ps.PPO().batch.T, B=6)
    assert (exp.algo.lr, exp.env_kwargs, exp.info_keys) == (1e-2, {"x": 1}, ("k",))


def test_options_of_resets_and_an_empty_mask() -> None:
    exp = meant("--env-options", "level=3", "name=a", "--env-mask", "")
    assert (exp.env_options, exp.env_mask) == ({"level": 3, "name": "a"}, "")
    assert exp.env_config.options == {"level": 3, "name": "a"} and exp.eval_env_config.options == exp.env_options


def test_auto_keeps_the_batch_until_a_sampler_is_chosen() -> None:
    assert meant("--sampler", "auto", "--sampler.T", "9").sampler == ps.SerialSampler(T=9, B=ps.PPO().batch.B)


def test_a_slot_has_a_core_for_each_process_that_computes() -> None:
    for options, cores in (
        (("--sampler", "serial"), 1),
        (("--sampler", "auto"), 1),
        (("--sampler", "cpu", "--sampler.workers", "3"), 3),  # the learner waits meanwhile
        (("--sampler", "gpu", "--sampler.workers", "3"), 4),  # it acts for them
        (("--sampler", "async-serial"), 2),  # it trains meanwhile
        (("--sampler", "async-cpu", "--sampler.inner.workers", "2"), 3),
    ):
        assert meant(*options).sampler_settings.cores == cores, options


def test_whole_numbers_may_be_written_as_people_do() -> None:
    exp = meant("--run.steps", "1e5", "--sampler.T", "1_2", "--algo.epochs=1.0e1", "--algo.net.hidden", "64", "1e2")
    assert (exp.run.steps, exp.sampler.T, exp.algo.epochs, exp.algo.net.hidden) == (100_000, 12, 10, (64, 100))
    assert meant("--run.learner-threads", "2e0").run.learner_threads == 2
    assert seed_list("1, 2e0,1_0") == [1, 2, 10]
    for option in ("--run.steps", "--sampler.B"):
        with pytest.raises(ps.ConfigError, match=f"{option[2:]}='1.5' .*expected a whole number"):
            meant(option, "1.5")


HINTS = {
    "--algo.gamma": "did you mean --algo.discount?",
    "--gamma": "did you mean --algo.discount?",
    "--algo.lrr": "did you mean --algo.lr?",
    "--learners": "did you mean --run.learners?",
    "--vf-clip-param": "did you mean --algo.value_clip: of a change of the value",
    "--algo.ent-coef": "did you mean --algo.entropy_coef?",
    "--exploration-fraction": "it is --algo.epsilon of ps.BootDQN, ps.DQN, ",
    "--learning-rate=3": "did you mean --algo.lr?",
    "--num-envs": "did you mean --sampler.B?",
    "--total_timesteps": "did you mean --run.steps?",
    "--run.stpes": "did you mean --run.steps",
    "--algo.net.hiden": "did you mean --algo.net.hidden",
    "--sampler.workers": "it is --sampler.workers of --sampler cpu, gpu, alternating, no-overlap-alternating: name one",
    "--num-workers": "it is --sampler.workers of --sampler cpu, gpu, alternating",
    "--sampler.groups": "it is --sampler.groups of --sampler cpu, gpu, alternating",
    "--buffer-size": "it is --algo.replay.capacity of ps.ReplaySettings",
    "--algo.replay.dataset": "--algo.replay is of ps.BootDQN, ps.CQL, ",
    "--algo.rnd.ceof": "did you mean --algo.rnd.coef?",
    "--algo.rnd.net.hiden": "did you mean --algo.rnd.net.hidden?",
    "--algo.rnd.foo": "--algo.rnd.X is one of coef, extrinsic_coef, discount, share, clip, features",
}


def test_an_unknown_option_is_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for option, hint in HINTS.items():
        with pytest.raises(SystemExit) as left:
            meant(option, "3")
        assert left.value.code == 2
        assert f"penstock train: unknown option {option.split('=')[0]}; {hint}" in capsys.readouterr().err


def test_layers_are_lists_of_lists() -> None:
    layers = "[[16, 3, 1, 1], [8, 3, 2]]"
    for words in (["--algo.net.cnn", layers], [f"--algo.net.cnn={layers}"]):
        assert meant("--algo.lr", "1e-4", *words, "--run.seed", "3").algo.net.cnn == ((16, 3, 1, 1), (8, 3, 2))
    with pytest.raises(ps.ConfigError, match=r"--algo\.net\.cnn '\[\[16, 3' is no JSON"):
        meant("--algo.net.cnn", "[[16, 3")


@pytest.mark.parametrize("words", [["64,32"], ["[64,32]"], ["[64, 32]"], ["64", "32"]])
def test_widths_may_be_written_as_people_do(words: list[str]) -> None:
    assert meant("--algo.net.hidden", *words, "--run.seed", "3").algo.net.hidden == (64, 32)
    assert meant(f"--algo.net.hidden={words[0]}", *words[1:]).algo.net.hidden == (64, 32)


@pytest.mark.parametrize("words", [["a,b"], ["a, b"], ['["a", "b"]'], ["a", "b"]])
def test_so_may_names(words: list[str]) -> None:
    assert meant("--algo.net.actor-keys", *words, "--run.seed", "3").algo.net.actor_keys == ("a", "b")


def test_cpus_of_workers_may_be_given() -> None:
    for words in (
        ["--sampler.affinity", '{"workers": [[0], [0]], "server": [0]}'],
        ["--sampler.affinity.workers", "[[0],[0]]", "--sampler.affinity.server", "0"],
    ):
        exp = meant("--sampler", "cpu", "--sampler.workers", "2", *words)
        assert exp.sampler.affinity == ps.Placement(((0,), (0,)), (0,))
    with pytest.raises(ps.ConfigError, match=r"sampler\.affinity places 1 workers and sampler\.workers=2"):
        meant("--sampler", "cpu", "--sampler.workers", "2", "--sampler.affinity.workers", "[[0]]")


def test_words_by_the_type_of_the_setting() -> None:
    exp = meant(
        "--run.stop", "a/b", "4.5", "c", "1e2", "--run.dir", "7", "--run.trace", "None", "--algo.net.shared", "true",
        "--algo.target-kl", "none", "--algo.lr", "1e-3", "--algo.clip", "linear(0.2, 0)", "--algo.net.cnn", "impala",
    )  # fmt: skip
    assert (exp.run.stop, exp.run.dir, exp.run.trace) == ({"a/b": 4.5, "c": 100.0}, "7", None)
    assert (exp.algo.net.shared, exp.algo.target_kl, exp.algo.lr, exp.algo.clip) == (True, None, 1e-3, "linear(0.2, 0)")
    assert (type(exp.algo.lr), exp.algo.net.cnn) == (float, "impala")
    assert meant("--run.stop", "{}").run.stop == {}
    for words, said in (
        (("--run.seed", "1", "2"), "--run.seed has 2 values: 1 2; expected one"),
        (("--run.seed",), "--run.seed has 0 values; expected one"),
        (("--run.stop", "a"), "--run.stop has 1 values; expected pairs"),
        (("--algo.net.shared", "maybe"), r"algo.net.shared='maybe' .*expected"),
        (("--run.progress", "lve"), "did you mean 'live'"),
    ):
        with pytest.raises(ps.ConfigError, match=said):
            meant(*words)
