"""Settings that change in a run: they act from the next batch on, are logged, and a resumed run makes them again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.learn import precision
from penstock.run.files.changes import RUN_SETTINGS, changed
from penstock.run.log import CHANGES

NET = ps.Net(hidden=(8,))
NET_OF_R2D1 = ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=8)
PPO = ps.PPO(epochs=2, minibatch=32, net=NET)
DQN = ps.DQN(learning_starts=40, replay_ratio=8, batch_size=16, net=NET, epsilon=0.5)
SERIAL = ps.SerialSampler(T=16, B=4)
ON_POLICY = {
    2: {"algo.lr": 1e-3, "algo.entropy_coef": "linear(0.02, 0)", "algo.clip": "tests.run.test_changes:tightened"},
    4: {
        "algo.epochs": 1,
        "algo.minibatch": 16,
        "algo.discount": 0.9,
        "algo.gae_lambda": 0.8,
        "algo.max_grad_norm": 0.1,
    },
    5: {"run.steps": 420, "algo.lr": "warmup(0.9, 1e-2)", "run.eval_episodes": 2},
}
OFF_POLICY = {
    2: {"algo.epsilon": 0.1, "algo.replay_ratio": 16, "algo.discount": 0.9, "algo.lr": 1e-2},
    4: {"algo.batch_size": 8, "algo.target_interval": 3, "algo.tau": 0.5, "algo.adam_eps": 1e-3},
    5: {"run.steps": 420, "algo.replay.priority_alpha": 0.9, "algo.replay.priority_beta": 1.0},
}
Changes = Mapping[int, Mapping[str, Any]]


def tightened(progress: float) -> float:
    return 0.3 - 0.2 * progress


def play(run: ps.Run, changes: Changes, stop: int | None = None) -> ps.Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with run:
            for it in run:
                if it.itr in changes:
                    it.run.set(changes[it.itr])
                if it.itr == stop:
                    break
    return run


def each(run: ps.Run, function: Callable[[ps.Iteration], None]) -> None:
    with run:
        for it in run:
            function(it)


def experiment(case: str, folder: Path, **run: Any) -> ps.Experiment:
    algo, sampler, env, _ = CASES[case]
    given: dict[str, Any] = {"steps": 640, "eval_episodes": 0, "checkpoint_interval": 0, **run}
    config = ps.RunConfig(seed=3, log_interval=0, progress="off", dir=str(folder), **given)
    return ps.Experiment(env, algo, sampler, config)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics that do not depend on the clock or on who collects."""
    kinds = ("step", "train", "rollout", "replay", "settings", "eval")
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k.split("/")[0] in kinds} for row in found]


CPU = ps.CpuSampler(T=16, B=4, workers=2)
SAC = ps.SAC(learning_starts=20, replay_ratio=8, batch_size=16, net=NET)
POLE, PENDULUM, BITS = "CartPole-v1", "Pendulum-v1", "penstock.envs.toy:TeamBits"
CASES: dict[str, tuple[Any, Any, Any, Changes]] = {
    "ppo": (PPO, SERIAL, POLE, ON_POLICY),
    "ppo-cpu": (PPO, CPU, POLE, ON_POLICY),
    "ppo-gpu": (PPO, ps.GpuSampler(T=16, B=4, workers=2), POLE, ON_POLICY),
    "ppo-async": (PPO, ps.AsyncSampler(inner=CPU), POLE, ON_POLICY),
    "ppo-runners": (PPO, ps.RunnerSampler(inner=ps.SerialSampler(T=16, B=2), runners=2), POLE, ON_POLICY),
    "dqn": (ps.override(DQN, {"replay.index": "prioritized", "replay.capacity": 400}), SERIAL, POLE, OFF_POLICY),
    "dqn-shards": (
        ps.override(DQN, {"replay.shards": 2, "replay.shard_backend": "in-process"}), SERIAL, POLE,
        {2: {"algo.discount": 0.8, "algo.replay_ratio": 16}, 4: {"algo.discount": "linear(0.9, 0.5)", "run.steps": 420}},
    ),
    "r2d1": (
        ps.R2D1(burn_in=2, train_length=4, state_interval=16, learning_starts=40, batch_size=4, net=NET_OF_R2D1,
                replay=ps.ReplaySettings(index="prioritized", fresh_priority="agent", capacity=400)),
        SERIAL, POLE, {2: {"algo.discount": 0.8, "algo.epsilon": 0.2}, 4: {"algo.target_interval": 3, "run.steps": 420}},
    ),
    "sac-auto": (SAC, SERIAL, PENDULUM,
                 {2: {"algo.actor_lr": 1e-3, "algo.tau": "linear(0.5, 0.1)"}, 4: {"run.steps": 420}}),
    "sac": (ps.override(SAC, {"alpha": 0.5}), SERIAL, PENDULUM,
            {2: {"algo.alpha": "exponential(0.5, 0.01)"}, 4: {"run.steps": 420}}),
    "many": (
        ps.Policies({"a": PPO, "b": DQN}, policy_mapping_fn={"agent_0": "a", "agent_1": "b"}), SERIAL, BITS,
        {2: {"algo.algos.a.lr": 1e-3, "algo.algos.b.epsilon": 0.9}, 4: {"algo.algos.b.replay_ratio": 2, "run.steps": 420}},
    ),
    "self-play": (ps.SelfPlay(PPO, interval=2), SERIAL, "penstock.envs.toy:Nim",
                  {2: {"algo.algo.lr": 1e-3, "algo.interval": 1, "algo.matchmaking": "even"}, 4: {"run.steps": 420}}),
}  # fmt: skip


@pytest.mark.parametrize("case", [x if x == "ppo" else pytest.param(x, marks=pytest.mark.slow) for x in CASES])
def test_a_run_resumed_after_any_of_them_is_the_run_that_never_stopped(case: str, tmp_path: Path) -> None:
    changes = CASES[case][3]
    play(ps.Run(experiment(case, tmp_path / "whole")), changes)
    whole = rows(tmp_path / "whole")
    assert "settings/run.steps" in {key for row in whole for key in row}
    assert 420 <= whole[-1]["step"] < 640  # as the last change asks
    plain = rows(play(ps.Run(experiment(case, tmp_path / "plain")), {}).run_dir)
    first = next(i for i, (x, y) in enumerate(zip(whole, plain)) if x != y)
    named = any(isinstance(x, (int, float)) for x in changes[min(changes)].values())
    assert first == min(changes) - named  # the row that names the change, or that of the next batch
    for stop in (*changes, max(changes) + 1):
        folder = tmp_path / f"cut{stop}"
        play(ps.Run(experiment(case, folder)), changes, stop)
        play(ps.Run.resume(folder), changes)
        assert rows(folder) == whole, stop


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo-cpu", "ppo-gpu", "ppo-runners"])
def test_placement_changes_nothing(case: str, tmp_path: Path) -> None:
    play(ps.Run(experiment("ppo", tmp_path / "a")), ON_POLICY)
    play(ps.Run(experiment(case, tmp_path / "b")), ON_POLICY)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo", "dqn"])
def test_learners_change_with_rank_0(case: str, tmp_path: Path) -> None:
    changes = {x: {k: v for k, v in y.items() if "epochs" not in k} for x, y in CASES[case][3].items()}
    play(ps.Run(experiment(case, tmp_path / "one")), changes)
    play(ps.Run(experiment(case, tmp_path / "two", learners=2)), changes)
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [row["train/learning_rate"] for row in one] == [row["train/learning_rate"] for row in two]
    for x, y in zip(one[:4], two[:4]):  # a rank that kept the old settings would soon train otherwise
        for name in [key for key in x if key in ("step", "train/loss", "train/value_loss", "train/q")]:
            assert y[name] == pytest.approx(x[name], rel=1e-4), name
    play(ps.Run(experiment(case, tmp_path / "cut", learners=2)), changes, 4)
    play(ps.Run.resume(tmp_path / "cut"), changes)
    assert rows(tmp_path / "cut") == two


def test_what_a_change_says_and_where_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exp = ps.override(experiment("ppo", tmp_path / "a", steps=256), {"run.progress": "plain"})
    with ps.Run(exp) as run:
        for it in run:
            if it.itr == 2:
                run.set({"algo.lr": 1e-4, "algo.clip": "linear(0.2, 0)"})
    row, said = rows(tmp_path / "a")[1], capsys.readouterr()
    assert f"step {row['step']}: algo.lr 0.0003 -> 0.0001" in said.out + said.err
    assert row["settings/algo.lr"] == 1e-4 and row["train/learning_rate"] == 3e-4
    assert rows(tmp_path / "a")[2]["train/learning_rate"] == 1e-4
    assert [x.get("settings/algo.lr") for x in rows(tmp_path / "a")] == [
        None,
        *[1e-4] * (len(rows(tmp_path / "a")) - 1),
    ]
    journal = [json.loads(line) for line in (tmp_path / "a" / CHANGES).read_text().splitlines()]
    assert journal == [{"step": row["step"], "set": {"algo.lr": 1e-4, "algo.clip": "linear(0.2, 0)"}}]
    began: Any = ps.load(tmp_path / "a").settings
    assert began.lr == 3e-4  # config.json keeps what the run began with


def test_a_change_that_recompiles_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = precision.Compiler(lambda function: function)
    monkeypatch.setattr(precision, "Compiler", lambda: compiler)
    with pytest.warns(UserWarning, match="compiled in"), ps.Run(experiment("ppo", tmp_path / "a", compile=True)) as run:
        run.set({"algo.lr": 1e-4})
    with warnings.catch_warnings(record=True) as caught, ps.Run(experiment("ppo", tmp_path / "b", compile=True)) as run:
        run.set({"run.keep": 1})
    assert not any("compiled in" in str(x.message) for x in caught)


def test_a_changed_number_stands_in_every_later_row_and_adds_none(tmp_path: Path) -> None:
    changes = {
        2: {"algo.lr": 1e-4, "run.stop.rollout/episodes": 1e9},
        5: {"algo.lr": "linear(1e-4, 0)", "run.stop": {}},
    }
    exp = ps.override(experiment("ppo", tmp_path / "a"), {"run.log_interval": 180})
    play(ps.Run(exp), changes)
    found = [
        (x["step"], x.get("settings/algo.lr"), x.get("settings/run.stop.rollout/episodes"))
        for x in rows(tmp_path / "a")
    ]
    lengths = [y[0] - x[0] for x, y in zip(found, found[1:])]
    play(ps.Run(ps.override(exp, {"run.dir": str(tmp_path / "b")})), changes, 3)
    with ps.Run.resume(tmp_path / "b") as run:
        assert run.standing == {"settings/algo.lr": 1e-4, "settings/run.stop.rollout/episodes": 1e9}
        for it in run:
            if it.itr == 4:
                assert it.metrics["settings/algo.lr"] == 1e-4
            if it.itr in changes:
                it.run.set(changes[it.itr])
    assert rows(tmp_path / "b") == rows(tmp_path / "a")
    assert found[0][1:] == (1e-4, 1e9) and found[1][1:] == (1e-4, 1e9)
    assert all(row[1:] == (None, None) for row in found[2:])
    assert max(lengths) > 64  # rows between two intervals are those of changes only


STEPS_OF_PLATEAU = ps.Plateau(patience=2, factor=0.5, least=5e-5)


def test_a_plateau_lowers_the_step_size_and_a_resumed_run_does_so_at_the_same_steps(tmp_path: Path) -> None:
    given = {"steps": 960, "eval_interval": 60, "eval_episodes": 1, "each": "tests.run.test_changes:STEPS_OF_PLATEAU"}
    play(ps.Run(experiment("ppo", tmp_path / "a", **given)), {})
    found = rows(tmp_path / "a")
    expected, lr, best, waited = list[float | None](), 3e-4, -1.0, 0
    changed_once = False
    for row in found:
        score = row["eval/mean_reward"]
        best, waited = (score, 0) if score > best else (best, waited + 1)
        if waited == 2 and lr > 5e-5:
            lr, waited, changed_once = max(lr * 0.5, 5e-5), 0, True
        expected.append(lr if changed_once else None)
    assert [row.get("settings/algo.lr") for row in found] == expected
    assert lr == 5e-5
    second = expected.index(7.5e-5) + 1
    play(ps.Run(experiment("ppo", tmp_path / "cut", **given)), {}, second - 1)
    play(ps.Run.resume(tmp_path / "cut"), {})
    assert rows(tmp_path / "cut") == found


@pytest.mark.parametrize(
    ("settings", "given", "why"),
    [
        ({"metric": "eval/mean_rewards"}, {}, "did you mean 'eval/mean_reward'"),
        ({"setting": "algo.lrr"}, {}, "did you mean 'lr'"),
        ({"setting": "algo.optimizer"}, {}, "expected the path of a number"),
        ({}, {"eval_interval": 0}, r"set run\.eval_interval"),
    ],
)
def test_a_plateau_names_what_it_cannot_do(settings: Any, given: Any, why: str, tmp_path: Path) -> None:
    run = ps.Run(experiment("ppo", tmp_path / "a", **{"eval_interval": 60, "eval_episodes": 1, **given}))
    with pytest.raises(ConfigError, match=why):
        each(run, ps.Plateau(**settings))


@pytest.mark.parametrize("settings", [{"factor": 1.0}, {"patience": 0}, {"metric": "rollout/ep_rew_mean"}])
def test_a_plateau_without_sense_is_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"Plateau\(.*expected"):
        ps.Plateau(**settings)


def test_a_warning_of_a_change_names_the_line_of_its_user(tmp_path: Path) -> None:
    lines = Path(__file__).read_text().splitlines()
    exp = experiment("ppo", tmp_path / "a", steps=256, eval_interval=60, eval_episodes=1)
    with warnings.catch_warnings(record=True) as told, ps.Run(exp) as run:
        warnings.simplefilter("always")
        for it in run:
            run.set({"algo.lr": 1e-3 + it.itr * 1e-6})
            ps.Plateau(setting="algo.clip", factor=0.999, patience=1)(it)
    said = {str(x.message).split(": ")[1].split()[0]: (x.filename, lines[x.lineno - 1]) for x in told}
    assert {name: file for name, (file, _) in said.items()} == {"algo.lr": __file__, "algo.clip": __file__}
    assert "run.set(" in said["algo.lr"][1] and "ps.Plateau(" in said["algo.clip"][1]


def test_what_resume_is_told_counts_for_more_and_from_then_on(tmp_path: Path) -> None:
    play(ps.Run(experiment("ppo", tmp_path / "a", steps=256)), {2: {"run.steps": 192, "algo.lr": 1e-4}})
    with pytest.raises(ConfigError, match="has finished its 192 steps"):
        ps.resume(tmp_path / "a")
    assert ps.resume(tmp_path / "a", {"run.steps": 320}).env_steps >= 320
    run = play(ps.Run.resume(tmp_path / "a", {"run.steps": 400}), {})
    assert run.result.env_steps >= 400
    assert run.result.metrics["train/learning_rate"] == 1e-4


REFUSED: dict[str, tuple[Any, str]] = {
    "groups": ({"algo.lr_scales": {"actor.*": 0.1}}, "needs other optimizers"),
    "networks": ({"algo.net.hidden": (9,)}, r"algo\.net\.hidden cannot change"),
    "part": ({"algo.rnd.coef": 0.5}, r"algo\.rnd\.coef cannot change"),
    "net": ({"algo.net": ps.Net()}, r"algo\.net cannot change"),
    "algo": ({"algo": ps.PPO()}, "algo cannot change"),
    "optimizer": ({"algo.optimizer": "rmsprop"}, "cannot change"),
    "slots": ({"sampler.T": 8}, r"sampler\.T cannot change"),
    "seed": ({"run.seed": 4}, r"of run steps, stop"),
    "typo": ({"algo.learning_rate": 4}, "it is 'lr' here|'algo.lr'"),
    "limit": ({"algo.lr": -1.0}, "lr=-1.0; expected more than 0"),
    "lambda": ({"algo.lr": lambda progress: 1e-3}, "cannot be stored"),
    "nothing": ({}, "expected settings by path"),
    "no path": (["algo.lr"], "expected settings by path"),
    "policy": ({"algo.algos.a.lr": 1.0}, "algos"),
}


def test_what_cannot_change_is_refused_by_name_and_nothing_has_changed(tmp_path: Path) -> None:
    with ps.Run(experiment("ppo", tmp_path / "a", steps=128)) as run:
        for it in run:
            for asked, why in REFUSED.values() if it.itr == 1 else ():
                with pytest.raises(ConfigError, match=why):
                    run.set(asked)
    assert not (tmp_path / "a" / CHANGES).exists()
    with pytest.raises(ConfigError, match="with of this run is over"):
        run.set({"algo.lr": 1e-4})


def test_a_pattern_with_dots_is_one_key_of_the_path(tmp_path: Path) -> None:
    scales = {"head.linear.*": 0.1, "critic.*": 0.5}
    exp = ps.override(experiment("ppo", tmp_path / "a", steps=250), {"algo.lr_scales": scales})
    play(ps.Run(exp), {2: {"algo.lr_scales.head.linear.*": 0.2}}, 3)
    with ps.Run.resume(tmp_path / "a") as run:
        for it in run:
            policy: Any = it.policy
            rates = [float(group["lr"]) for x in policy.optimizers.values() for group in x.param_groups]
            assert sorted(rates) == pytest.approx([0.6e-4, 1.5e-4, 3e-4])
        algo: Any = run.trainer.exp.algo
        assert algo.lr_scales == {**scales, "head.linear.*": 0.2}
    assert [row["settings/algo.lr_scales.head.linear.*"] for row in rows(tmp_path / "a")[1:2]] == [0.2]


class Wide(torch.nn.Module):
    def __init__(self, obs: Any) -> None:
        super().__init__()
        self.features = 6
        self.layer = torch.nn.Linear(obs.shape[0], 6)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.layer(obs)


@pytest.mark.parametrize("many", [False, True])
def test_settings_change_after_the_file_of_the_encoder_has_gone(many: bool, tmp_path: Path) -> None:
    file = tmp_path / "encoder.pt"
    torch.save({"layer.weight": torch.ones(6, 4), "layer.bias": torch.ones(6)}, file)
    algo = ps.PPO(epochs=1, minibatch=32, net=ps.Net(hidden=(8,), encoder=Wide, encoder_weights=str(file)))
    exp = experiment("ppo", tmp_path / "a", steps=130)
    with ps.Run(ps.override(exp, {"algo": ps.Policies({"a": algo}) if many else algo})) as run:
        file.unlink()
        for it in run:
            if it.itr == 1:
                run.set({"algo.algos.a.lr" if many else "algo.lr": 1e-5})
    assert rows(tmp_path / "a")[-1]["train/learning_rate"] == 1e-5
    after: Any = run.trainer.exp.algo
    assert (after.algos["a"] if many else after).net.encoder_weights == str(file)


def test_the_last_iteration_can_make_the_run_longer_or_change_what_an_extension_trains_with(tmp_path: Path) -> None:
    run = play(ps.Run(experiment("ppo", tmp_path / "a", steps=60)), {1: {"run.steps": 120}, 2: {"algo.lr": 1e-3}})
    assert [row["step"] for row in rows(tmp_path / "a")] == [62, 122]
    assert (run.result.env_steps, run.result.stopped_by) == (122, "steps")
    ps.resume(tmp_path / "a", {"run.steps": 180})
    play(ps.Run(experiment("ppo", tmp_path / "b", steps=180)), {2: {"algo.lr": 1e-3}})
    extended, longer = rows(tmp_path / "a")[-1], rows(tmp_path / "b")[-1]
    assert extended["train/learning_rate"] == 1e-3
    assert extended == longer | {"settings/run.steps": 180.0}  # that of "a" has changed in the run


def test_alpha_that_is_learned_is_no_number_later(tmp_path: Path) -> None:
    with ps.Run(experiment("sac-auto", tmp_path / "a", steps=128)) as run:
        for it in run:
            if it.itr == 1:
                with pytest.raises(ConfigError, match="needs other optimizers"):
                    run.set({"algo.alpha": 0.1})


def test_every_run_setting_that_may_change_exists() -> None:
    exp = ps.Experiment(POLE, PPO)
    for name in RUN_SETTINGS:
        changed(exp, {f"run.{name}": getattr(exp.run, name)})


def test_a_rate_that_somebody_changed_is_seen_and_told(tmp_path: Path) -> None:
    def freeze(it: ps.Iteration) -> None:
        if it.itr == 2:
            it.policy.optimizers["all"].param_groups[0]["lr"] = 0.0

    with pytest.warns(UserWarning, match=r"'all' has lr 0 in its param_groups, and the settings say 0\.0003"):
        each(ps.Run(experiment("ppo", tmp_path / "a", steps=300)), freeze)
    assert [row["train/learning_rate"] for row in rows(tmp_path / "a")] == [3e-4, 3e-4, 0.0, 0.0, 0.0]


CODE = {"import": "os:system", "args": ["true"], "kwargs": {}}


@pytest.mark.parametrize("value", ["os:system", CODE])
def test_a_journal_that_somebody_else_wrote_calls_nothing(value: Any, tmp_path: Path) -> None:
    play(ps.Run(experiment("ppo", tmp_path / "a", steps=256)), {2: {"algo.lr": 1e-4}}, 3)
    row = {"step": 10, "set": {"algo.lr": value}}  # the settings of the run are this user's, and trusted
    (tmp_path / "a" / CHANGES).write_text(json.dumps(row) + "\n")
    with pytest.raises(CheckpointError, match=r"changes\.jsonl names .*os:system.*written elsewhere"):
        ps.resume(tmp_path / "a")


@pytest.mark.parametrize("how", ["gone", "flipped", "other"])
def test_a_journal_that_has_lost_a_row_is_named(how: str, tmp_path: Path) -> None:
    path = play(ps.Run(experiment("ppo", tmp_path / "a", steps=256)), {2: {"algo.lr": 1e-4}}, 3).run_dir / CHANGES
    text = path.read_text()
    path.unlink() if how == "gone" else path.write_text(
        "x" + text if how == "flipped" else text.replace("0.0001", "0.1")
    )
    with pytest.raises(CheckpointError, match=r"changes\.jsonl is damaged or gone: .* after 1 changes"):
        ps.resume(tmp_path / "a")


def test_the_last_of_a_rule_and_its_part_counts(tmp_path: Path) -> None:
    steps = {1: {"run.stop": {"rollout/episodes": 1e9}}, 2: {"run.stop.rollout/ep_rew_mean": 1e9}, 3: {"run.stop": {}}}
    run = play(ps.Run(experiment("ppo", tmp_path / "a")), steps, 4)
    assert run.trainer.exp.run.stop == {}
    with ps.Run.resume(tmp_path / "a") as again:
        assert again.trainer.exp.run.stop == {}


def test_rules_and_lengths_that_would_end_the_run_are_refused(tmp_path: Path) -> None:
    def ask(it: ps.Iteration) -> None:
        if it.itr == 4:
            with pytest.raises(ConfigError, match="'rollout/ep_rew_man', which this run does not report; did you mean"):
                it.run.set({"run.stop": {"rollout/ep_rew_man": 1.0}})
            with pytest.raises(ConfigError, match="'eval/nope', which evaluations do not report"):
                it.run.set({"run.stop": {"eval/nope": 1.0}})
            with pytest.raises(ConfigError, match=r"run\.steps=20 at \d+ steps; expected more"):
                it.run.set({"run.steps": 20})

    each(ps.Run(experiment("ppo", tmp_path / "a", steps=300, eval_episodes=1)), ask)


def test_the_replay_ratio_that_is_reported_stays_true(tmp_path: Path) -> None:
    play(ps.Run(experiment("dqn", tmp_path / "a", steps=420)), {3: {"algo.replay_ratio": 32, "algo.batch_size": 8}})
    before, *after = rows(tmp_path / "a")[2:]
    updates = [row["train/n_updates"] - before["train/n_updates"] for row in after]
    for row, n in zip(after, updates):
        trained = before["train/n_updates"] * 16 + n * 8
        assert row["replay/ratio"] == pytest.approx(trained / (row["step"] - 40))


@pytest.mark.parametrize(
    "row", ['{"step": 1, "set": 5}', '{"step": 1, "set": {"algo.lr": "no"}}', '{"step": 1, "set": {"x": 1}}']
)
def test_a_damaged_journal_is_named(row: str, tmp_path: Path) -> None:
    play(ps.Run(experiment("ppo", tmp_path / "a", steps=256)), {2: {"algo.lr": 1e-4}}, 3)
    (tmp_path / "a" / CHANGES).write_text(row + "\n")
    with pytest.raises((CheckpointError, ConfigError), match=r"changes\.jsonl"):
        ps.resume(tmp_path / "a")
