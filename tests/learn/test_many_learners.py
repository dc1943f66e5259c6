from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.learn.settings import AlgorithmFunctions
from tests.learn.ranks import ThreadComm, apart, batches_of, on_ranks, trained
from tests.params import slow_but

CLOSE = 1e-6
SMALL = ps.Net(hidden=(16,))
LSTM = ps.Net(hidden=(16,), recurrent="lstm", recurrent_size=8)
NORMS = ps.Net(hidden=(16,), normalize_obs=True, normalize_reward=True)
CASES: dict[str, tuple[str, Any, int, int, tuple[int, ...]]] = {
    "ppo": ("CartPole-v1", ps.PPO(epochs=2, minibatch=256, net=SMALL), 64, 16, (8, 8)),
    "ppo-uneven": ("CartPole-v1", ps.PPO(epochs=2, minibatch=32, net=SMALL), 16, 8, (1, 5, 2)),
    "ppo-with-empty-shares": ("CartPole-v1", ps.PPO(epochs=1, minibatch=2, net=SMALL), 8, 4, (1, 3)),
    "ppo-normalisers": ("Pendulum-v1", ps.PPO(epochs=2, minibatch=64, net=NORMS), 32, 6, (2, 4)),
    "ppo-lstm": ("CartPole-v1", ps.PPO(epochs=2, minibatch=64, net=LSTM), 16, 16, (8, 8)),
    "ppo-lstm-with-empty-shares": ("CartPole-v1", ps.PPO(epochs=2, minibatch=16, net=LSTM), 16, 7, (1, 5, 1)),
    "a2c": ("CartPole-v1", ps.A2C(normalize_advantage=True, net=SMALL), 16, 8, (3, 5)),
    "impala": ("CartPole-v1", ps.IMPALA(normalize_advantage=True, net=SMALL), 16, 8, (3, 5)),
    "bc": ("CartPole-v1", ps.BC(minibatch=32, net=SMALL), 16, 8, (3, 5)),
    "marwil": ("CartPole-v1", ps.MARWIL(minibatch=32, net=SMALL), 16, 8, (3, 5)),
    "pqn": ("CartPole-v1", ps.PQN(epochs=2, minibatch=64, net=ps.Net(hidden=(16,), norm="layer")), 16, 8, (3, 5)),
    "appo": ("CartPole-v1", ps.APPO(epochs=2, minibatch=64, net=SMALL), 16, 8, (3, 5)),
    "ppo-rnd": (
        "Pendulum-v1",
        ps.PPO(epochs=2, minibatch=64, net=SMALL, rnd=ps.RND(share=0.5, net=SMALL)),
        16,
        6,
        (2, 4),
    ),
}


@pytest.mark.parametrize(
    "case",
    slow_but("ppo-uneven ppo-normalisers ppo-lstm-with-empty-shares impala marwil", [*CASES]),
)
def test_learners_on_shares_equal_one_on_the_whole(case: str) -> None:
    env, algo, T, B, widths = CASES[case]
    updates_a_batch = 4 if case.startswith("ppo") else 1
    spec, batches = batches_of(env, algo, T, B, -(-20 // updates_a_batch))
    ((one, results),) = trained(algo, spec, batches, [B])
    many = trained(algo, spec, batches, widths)
    assert one.updates >= 20
    for policy, found in many:
        assert policy.updates == one.updates
        assert apart(policy, many[0][0]) == 0.0
        assert found == many[0][1]
    assert apart(one, many[0][0]) < CLOSE
    assert apart(one, algo.build(spec, seed=5)) > 1e-3
    alike = set(results[-1]) - {"train/explained_variance"}  # no mean over rows; see docs/learners.md
    assert {k: many[0][1][-1][k] for k in alike} == pytest.approx({k: results[-1][k] for k in alike}, abs=1e-4)


def test_statistics_of_all_learners_are_those_of_one_bit_for_bit() -> None:
    env, algo, T, B, widths = CASES["ppo-normalisers"]
    spec, batches = batches_of(env, algo, T, B, 3)
    ((one, _),) = trained(algo, spec, batches, [B])
    for policy, _ in trained(algo, spec, batches, widths):
        for name, x in one.agent.state_dict().items():
            if "moments" in name or "extra_state" in name:
                assert torch.equal(x, policy.agent.state_dict()[name]), name


def test_a_stop_is_that_of_the_common_mean() -> None:
    algo = ps.PPO(epochs=4, minibatch=32, lr=1e-2, target_kl=0.003, net=SMALL)
    spec, batches = batches_of("CartPole-v1", algo, 16, 8, 3)
    ((one, results),) = trained(algo, spec, batches, [8])
    many = trained(algo, spec, batches, (1, 7))
    stops = [r.get("train/stopped_after") for r in results]
    assert any(stops)
    assert [r.get("train/stopped_after") for r in many[0][1]] == stops
    assert many[1][0].updates == many[0][0].updates == one.updates


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all() -> None:
    algo = ps.PPO(epochs=1, minibatch=32, net=SMALL)
    spec, (batch,) = batches_of("CartPole-v1", algo, 16, 8, 1)
    batch.prev_reward[3, 7] = float("nan")
    found = trained(ps.PPO(epochs=1, minibatch=32, net=SMALL, normalize_advantage=False), spec, [batch], (4, 4))
    assert [p.skipped for p, _ in found] == [found[0][0].skipped] * 2
    assert 0 < found[0][0].skipped < 4
    assert found[0][0].updates == found[1][0].updates == 4 - found[0][0].skipped
    assert apart(found[0][0], found[1][0]) == 0.0


def test_a_rank_without_a_valid_row_takes_part() -> None:
    algo = ps.PPO(epochs=2, minibatch=32, net=SMALL)
    spec, batches = batches_of("CartPole-v1", algo, 16, 8, 2)
    for batch in batches:
        batch.valid[:, 5:] = False
    ((one, _),) = trained(algo, spec, batches, [8])
    many = trained(algo, spec, batches, (5, 3))
    assert apart(one, many[1][0]) < CLOSE
    assert many[0][0].updates == one.updates > 0


def test_a_batch_without_a_valid_row_anywhere_trains_nothing() -> None:
    algo = ps.PPO(epochs=2, minibatch=32, net=SMALL)
    spec, (batch,) = batches_of("CartPole-v1", algo, 16, 8, 1)
    batch.valid[...] = False
    for policy, results in trained(algo, spec, [batch], (5, 3)):
        assert policy.updates == 0
        assert "train/loss" not in results[0] and "train/explained_variance" not in results[0]


def test_stale_rows_are_counted_over_all_learners() -> None:
    algo = ps.IMPALA(max_lag=0, net=SMALL)
    spec, batches = batches_of("CartPole-v1", algo, 8, 4, 2)
    batches[1].version[:, 3] = 0
    batches[1].version[:, :3] = 1
    found = trained(algo, spec, batches, (3, 1))
    assert found[0][0].stale_rows == found[1][0].stale_rows == int(batches[1].valid[:, 3].sum()) > 0


def one_step(loss_fn: Any, agent_fn: Any = ps.actor_critic, optimizer_fn: Any = ps.adam) -> None:
    @dataclass(frozen=True)
    class Own(ps.PPO):
        functions = AlgorithmFunctions(ps.PPO.functions.postprocess, loss_fn, optimizer_fn)

    algo = Own(epochs=1, minibatch=32, net=SMALL, agent=agent_fn)
    spec, batches = batches_of("CartPole-v1", algo, 16, 4, 1)
    trained(algo, spec, batches, (2, 2))


def test_a_loss_whose_terms_differ_between_ranks_names_the_parameter() -> None:
    calls = itertools.count()

    def loss_fn(agent: Any, x: ps.TrainBatch, cfg: Any) -> ps.Loss:
        dist, value = agent(x.inputs)
        total = -dist.log_prob(x["action"]).mean()
        return ps.Loss(total + value.square().mean() if next(calls) == 0 else total, {})

    with pytest.raises(ps.ConfigError, match=r"critic.* takes part in the loss of 1 of 2 learners.*multiply by a mask"):
        one_step(loss_fn)


def test_a_total_that_only_some_ranks_have_names_a_parameter() -> None:
    calls = itertools.count()

    def loss_fn(agent: Any, x: ps.TrainBatch, cfg: Any) -> ps.Loss:
        dist, value = agent(x.inputs)
        totals = {"actor": -dist.log_prob(x["action"]).mean(), "critic": value.square().mean()}
        return ps.Loss({"actor": totals["actor"]} if next(calls) == 1 else totals, {})

    def optimizer_fn(agent: Any, cfg: Any) -> dict[str, Any]:
        named = dict(agent.named_parameters())
        values = [p for name, p in named.items() if name.startswith(("critic", "value"))]
        others = [p for name, p in named.items() if not name.startswith(("critic", "value"))]
        return {"actor": torch.optim.SGD(others, lr=0.1), "critic": torch.optim.SGD(values, lr=0.1)}

    with pytest.raises(ps.ConfigError, match=r"(critic|value).* takes part in the loss of 1 of 2 learners"):
        one_step(loss_fn, optimizer_fn=optimizer_fn)


def test_a_metric_that_only_some_ranks_report_is_the_mean_of_theirs() -> None:
    def loss_fn(agent: Any, x: ps.TrainBatch, cfg: Any) -> ps.Loss:
        loss = ps.PPO.functions.loss(agent, x, cfg)
        action = x["action"].double()
        some = {"late": action.mean()} if x["action"].sum() > 9 else {}
        return loss._replace(metrics={**some, **loss.metrics, "rows": torch.tensor(float(len(action)))})

    @dataclass(frozen=True)
    class Own(ps.PPO):
        functions = ps.PPO.functions._replace(loss=loss_fn)

    algo = Own(epochs=1, minibatch=32, net=SMALL)
    spec, (batch,) = batches_of("CartPole-v1", algo, 16, 4, 1)
    batch.action[...] = 0
    batch.action[:, 2:] = 1
    found = trained(algo, spec, [batch], (2, 2))
    ((one, results),) = trained(ps.PPO(epochs=1, minibatch=32, net=SMALL), spec, [batch], [4])
    assert apart(found[0][0], found[1][0]) == 0.0
    assert apart(found[0][0], one) < CLOSE
    assert found[0][1] == found[1][1]
    assert found[0][1][0]["train/late"] == 1.0  # the first two slots have no such action
    assert found[0][1][0]["train/loss"] == pytest.approx(results[0]["train/loss"], abs=1e-5)


def test_a_parameter_that_no_rank_trains_stays_as_with_one_learner() -> None:
    """BC's critic is one: with a gradient of 0 in the place of none its weights would decay."""
    algo = ps.BC(optimizer="adamw", net=SMALL)
    spec, batches = batches_of("CartPole-v1", algo, 16, 8, 2)
    start = algo.build(spec, seed=5).agent.state_dict()
    for policy, _ in trained(algo, spec, batches, (3, 5)):
        for name, x in policy.agent.state_dict().items():
            assert torch.equal(x, start[name]) is name.startswith(("critic", "value")), name


def test_ranks_that_begin_apart_are_refused() -> None:
    algo = ps.PPO(net=SMALL)
    spec, _ = batches_of("CartPole-v1", algo, 2, 2, 1)

    def work(comm: ThreadComm) -> None:
        algo.build(spec, seed=comm.rank // 2).join(comm)

    with pytest.raises(
        ps.ConfigError, match=r"parameters of rank \d differ from those of rank \d.*same settings and seed"
    ):
        on_ranks(3, work)


def test_a_rank_with_another_kernel_is_refused() -> None:
    other = torch.tensor(list(b"native 99".ljust(16)), dtype=torch.uint8)
    comm: Any = SimpleNamespace(rank=0, size=2, all_gather=lambda x: [x, other])
    policy = ps.PPO(net=ps.Net(hidden=(4,))).build(ps.SerialSampler(1, 1).build("CartPole-v1").spec, seed=0)
    with pytest.raises(ps.ConfigError, match=r"rank 0 computes dense layers by kernel '.+', rank 1 by 'native 99'"):
        policy.join(comm)


def test_ranks_join_before_the_first_batch() -> None:
    algo = ps.PPO(net=SMALL)
    spec, (batch,) = batches_of("CartPole-v1", algo, 4, 2, 1)
    policy = algo.build(spec)
    ps.train_one_step(policy, batch)
    with pytest.raises(ps.ConfigError, match="join before the first batch"):
        on_ranks(1, lambda comm: policy.join(comm))


def test_a_rank_whose_slots_change_is_told() -> None:
    algo = ps.PPO(net=SMALL)
    spec, (batch,) = batches_of("CartPole-v1", algo, 4, 4, 1)

    def work(comm: ThreadComm) -> None:
        policy = algo.build(spec)
        policy.join(comm)
        ps.train_one_step(policy, batch[:, comm.rank * 2 : comm.rank * 2 + 2])
        ps.train_one_step(policy, batch[:, :3])

    with pytest.raises(ps.ConfigError, match=r"B=3 after batches of B=2"):
        on_ranks(2, work)


def test_one_all_reduce_for_a_step() -> None:
    algo = ps.PPO(epochs=2, minibatch=32, net=SMALL)
    spec, (batch,) = batches_of("CartPole-v1", algo, 16, 4, 1)

    def work(comm: ThreadComm) -> list[tuple[str, tuple[int, ...]]]:
        policy = algo.build(spec, seed=5)
        policy.join(comm)
        ps.train_one_step(policy, batch[:, comm.rank * 2 : comm.rank * 2 + 2])
        return [call for call in comm.calls if call[1] != (1,)]

    calls, _ = on_ranks(2, work)
    size = sum(p.numel() for p in algo.build(spec).agent.parameters())
    large = [shape for name, shape in calls if name == "all_reduce" and shape[0] >= size]
    assert len(large) == 4 + 1  # 2 epochs of 2 minibatches; the first told once more, with its metrics' names known
    assert len([name for name, _ in calls if name == "all_reduce"]) == 5 + 1  # and the metrics of the batch


def with_layers(change: Any) -> Any:
    def agent_fn(spec: ps.EnvSpec, cfg: Any) -> ps.Agent:
        agent = ps.actor_critic(spec, cfg)
        for i, module in enumerate([m for m in agent.modules() if isinstance(m, torch.nn.Linear)]):
            change(i, module)
        return agent

    return agent_fn


def test_parameters_of_several_dtypes() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)

    def change(i: int, layer: torch.nn.Linear) -> None:
        layer.to(dtypes[i % 3])
        layer.register_forward_pre_hook(lambda m, x: x[0].to(m.weight.dtype))
        layer.register_forward_hook(lambda m, x, y: y.float())

    # Gradients of shares are bfloat16 too, which Adam would blow up: its steps are of one size.
    algo = ps.PPO(epochs=2, minibatch=32, net=SMALL, agent=with_layers(change), optimizer="rmsprop", adam_eps=1e-1)
    spec, batches = batches_of("CartPole-v1", algo, 16, 8, 2)
    ((one, _),) = trained(algo, spec, batches, [8])
    many = trained(algo, spec, batches, (3, 5))
    assert {p.dtype for p in one.agent.parameters()} == set(dtypes)
    assert apart(many[0][0], many[1][0]) == 0.0
    assert apart(one, many[0][0]) < 1e-3


def test_statistics_of_own_rows_are_refused() -> None:
    def change(_: int, layer: torch.nn.Linear) -> None:
        def watch(m: Any, x: Any) -> None:
            m.seen.add_(x[0].mean())

        layer.register_buffer("seen", torch.zeros(()))
        layer.register_forward_pre_hook(watch)

    algo = ps.PPO(epochs=1, minibatch=32, net=SMALL, agent=with_layers(change))
    spec, batches = batches_of("CartPole-v1", ps.PPO(net=SMALL), 16, 8, 1)
    with pytest.raises(ps.ConfigError, match=r"seen of rank 1 differs from that of rank 0 .* BatchNorm"):
        trained(algo, spec, batches, (3, 5))
