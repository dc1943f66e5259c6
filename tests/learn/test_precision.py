"""How a policy's functions compute: bfloat16 products and float32 around them, compilers that fail, what is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.agents.mlp import MLP, through
from penstock.agents.precision import in_full
from penstock.agents.recurrent import Memory
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.learn import precision
from penstock.learn.algorithm import Loss
from penstock.learn.precision import Compiler, compute, in_bf16, require_bf16
from penstock.run.trainer import Trainer

NET = ps.Net(hidden=(32, 32), activation="relu")
REPLAY = ps.ReplaySettings(capacity=1_000)
SMALL: dict[str, Any] = {"batch_size": 16, "replay_ratio": 2.0, "learning_starts": 32, "net": NET}
CASES: dict[str, tuple[str, Any]] = {
    "ppo": ("CartPole-v1", ps.PPO(epochs=2, minibatch=32)),
    "ppo-lstm": ("CartPole-v1", ps.PPO(epochs=2, minibatch=32, net=ps.Net(recurrent="lstm", normalize_obs=True))),
    "sac": ("Pendulum-v1", ps.SAC(**SMALL, replay=REPLAY)),
    "td3": ("Pendulum-v1", ps.TD3(**SMALL, replay=REPLAY)),
    "rainbow": (
        "CartPole-v1",
        ps.DQN(**SMALL, noisy=True, dueling=True, replay=ps.ReplaySettings(capacity=1_000, index="prioritized")),
    ),
    "r2d1": (
        "CartPole-v1",
        ps.R2D1(
            net=ps.Net(hidden=(16,), activation="relu", recurrent="lstm", recurrent_size=8), batch_size=4, burn_in=4,
            train_length=8, state_interval=16, learning_starts=64, replay_ratio=4.0,
            replay=ps.ReplaySettings(capacity=2_000, index="prioritized", fresh_priority="agent"),
        ),
    ),
}  # fmt: skip

QUICK = {"ppo", "rainbow"}


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every processor computes in bfloat16, by its own instructions or without."""
    monkeypatch.setattr(precision, "require_bf16", lambda device: None)


@pytest.fixture
def live() -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def live(case: str, **run: Any) -> Trainer:
        env, algo = CASES[case]
        settings = ps.RunConfig(**{"steps": 4_000, "seed": 3, **run})
        made.append(Trainer(ps.Experiment(env, algo, ps.SerialSampler(T=16, B=4), settings)))
        return made[-1]

    yield live
    for trainer in made:
        trainer.stop()


def bits(trainer: Trainer) -> dict[str, bytes]:
    state = trainer.policy.agent.state_dict()
    return {name: x.numpy().tobytes() for name, x in state.items() if isinstance(x, Tensor)}


def trained(trainer: Trainer, iterations: int) -> dict[str, bytes]:
    for _ in range(iterations):
        trainer.train()
    assert trainer.policy.updates > 0
    return bits(trainer)


# bfloat16.


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("case", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES])
def test_bf16_trains_close_to_float32_and_repeats_its_bits(case: str, live: Any) -> None:
    full, half = live(case), live(case, precision="bf16")
    assert bits(full) == bits(half)
    before = {name: x.detach().clone() for name, x in full.policy.agent.named_parameters()}
    exact, rounded = trained(full, 6), trained(half, 6)
    assert exact != rounded, "nothing was rounded"
    assert rounded == trained(live(case, precision="bf16"), 6)
    named = {name: x.detach() for name, x in half.policy.agent.named_parameters()}
    for name, x in full.policy.agent.named_parameters():
        assert named[name].dtype is torch.float32
        # Adam's steps have one size whatever the gradients, so those near 0 differ in sign: the mean is compared.
        x = x.detach()
        moved, apart = (x - before[name]).abs().mean(), (x - named[name]).abs().mean()
        assert float(apart) <= 0.3 * float(moved) + 1e-6, name


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("case", ["ppo", "sac"])
def test_a_bf16_run_is_resumed_bit_for_bit(case: str, live: Any, tmp_path: Any) -> None:
    whole = live(case, precision="bf16", dir=str(tmp_path))
    whole.run_dir = tmp_path
    trained(whole, 4)
    whole.save()
    later = live(case, precision="bf16")
    later.run_dir = tmp_path
    later.restore()
    assert trained(whole, 3) == trained(later, 3)


@pytest.mark.usefixtures("there")
def test_acting_is_float32_whatever_training_computes_in(live: Any) -> None:
    full, half = live("ppo"), live("ppo", precision="bf16")
    half.policy.agent.load_state_dict(full.policy.agent.state_dict())
    (a, _), (b, _) = full.sampler.obtain_samples(0), half.sampler.obtain_samples(0)
    assert a.obs.tobytes() == b.obs.tobytes()
    assert a.info["logp"].tobytes() == b.info["logp"].tobytes()


def test_products_are_bfloat16_but_those_of_output_layers() -> None:
    body, out = MLP(8, (16, 16)), nn.Linear(16, 2)
    x = torch.randn(5, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden, y = body(x), through(body, x, out)
        assert hidden.dtype is torch.bfloat16
        assert y.dtype is torch.float32
        assert in_full(out, hidden).dtype is torch.float32
        assert out(hidden).dtype is torch.bfloat16
    torch.testing.assert_close(y, out(hidden.float()))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_memory_computes_in_float32(kind: Any) -> None:
    memory = Memory(kind, 4, 8)
    x, first = torch.randn(6, 3, 4), torch.rand(6, 3) < 0.3
    plain, _ = memory(x, first, memory.initial_state(3))
    with torch.autocast("cpu", torch.bfloat16):
        found, state = memory(x, first, memory.initial_state(3))
    assert torch.equal(plain, found)
    assert all(s.dtype is torch.float32 for s in state.values())


def test_weights_rounded_without_a_gradient_are_not_those_that_get_one() -> None:
    """Autocast's cache would hand the cast of a burn-in, made under no_grad, to the pass that is differentiated."""
    policy = ps.PPO(net=NET, normalize_value=False).build(ps.SerialSampler(4, 4).build("CartPole-v1").spec)
    x = Inputs(torch.randn(8, 4), None, None, None)

    def loss_fn(agent: Any, rows: Any, settings: Any) -> Loss:
        with torch.no_grad():
            agent(x)
        return Loss(agent(x).value.mean(), {})

    found = in_bf16(loss_fn, policy)(policy.agent, None, None)
    gradients = torch.autograd.grad(found.total, list(policy.agent.critic.parameters()), allow_unused=True)
    assert all(g is not None and g.abs().sum() > 0 for g in gradients)


def test_what_the_functions_return_is_float32() -> None:
    policy = ps.PPO(net=NET).build(ps.SerialSampler(4, 4).build("CartPole-v1").spec)
    a, b = torch.randn(4, 4), torch.randn(4, 4)

    def answers(agent: Any, rows: Any, settings: Any) -> Any:
        x = a @ b
        assert x.dtype is torch.bfloat16
        if settings == "loss":
            return Loss({"all": x.mean()}, {"x": x.mean()}, x[0])
        return TrainBatch(Inputs(None, None, None, None), {"target": x, "next": {"deep": x}, "count": 3}, None)

    loss = in_bf16(answers, policy)(None, None, "loss")
    assert [x.dtype for x in (loss.total["all"], loss.metrics["x"], loss.priorities)] == [torch.float32] * 3
    rows = in_bf16(answers, policy)(None, None, "rows").rows
    assert [rows["target"].dtype, rows["next"]["deep"].dtype, rows["count"]] == [torch.float32, torch.float32, 3]


def test_a_processor_without_bf16_products_is_refused(monkeypatch: pytest.MonkeyPatch, live: Any) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with pytest.raises(ConfigError, match=r"run.precision='bf16' on cpu.*no bfloat16 products.*use 'float32'"):
        live("ppo", precision="bf16")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    require_bf16(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    with pytest.raises(ConfigError, match="on cuda:0, which has no bfloat16"):
        require_bf16(torch.device("cuda:0"))


# Compiled.


class Fake:
    """Stands for `torch.compile`: counts calls; from call number `fails` on what it made raises."""

    def __init__(self, fails: int = 1 << 30) -> None:
        self.fails, self.calls, self.made = fails, 0, 0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.made += 1

        def fast(*args: Any) -> Any:
            self.calls += 1
            if self.calls > self.fails:
                raise RuntimeError("\n\nno compiler found\nat line 3")
            return function(*args)

        return fast


@pytest.fixture
def by_fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake], None]:
    def by_fake(fake: Fake) -> None:
        monkeypatch.setattr(precision, "Compiler", lambda: Compiler(fake))

    return by_fake


@pytest.mark.parametrize(("case", "functions"), [("ppo", 1), ("sac", 2), ("td3", 2), ("rainbow", 2)])
def test_what_runs_in_each_update_is_compiled(case: str, functions: int, live: Any, by_fake: Any) -> None:
    plain, fake = trained(live(case), 4), Fake()
    by_fake(fake)
    compiled = live(case, compile=True)
    assert plain == trained(compiled, 4)
    assert fake.made == functions
    assert fake.calls == functions * compiled.policy.updates


@pytest.mark.parametrize("fails", [0, 3])
def test_a_compiler_that_fails_is_said_once_and_the_run_goes_on(fails: int, live: Any, by_fake: Any) -> None:
    plain, fake = trained(live("sac"), 4), Fake(fails)
    by_fake(fake)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert plain == trained(live("sac", compile=True), 4)
    (said,) = [str(x.message) for x in caught if "run.compile" in str(x.message)]
    assert said.startswith("run.compile: torch could not compile (RuntimeError: no compiler found); the run goes on")
    assert fake.calls == fails + 1, "it was asked again"


def test_a_backward_pass_that_cannot_be_compiled_is_said_as_well(live: Any, by_fake: Any) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            raise RuntimeError("no backward")

    def transform(function: Any) -> Any:
        def fast(*args: Any) -> Any:
            found = function(*args)
            return found._replace(total=Broken.apply(found.total))

        return fast

    plain = trained(live("ppo"), 2)
    by_fake(transform)
    with pytest.warns(UserWarning, match="could not compile .RuntimeError: no backward"):
        assert plain == trained(live("ppo", compile=True), 2)


@pytest.mark.parametrize("shapes", [1, 9])
def test_what_is_compiled_anew_for_the_same_shapes_is_not_compiled_for_ever(shapes: int) -> None:
    """A schedule gives each batch settings of its own; many shapes are no reason to end."""
    compiler = Compiler()
    calls: list[str] = []

    def transform(function: Any) -> Any:
        def fast(*args: Any) -> Any:
            calls.append("compiled")
            compiler._compilations += len(calls) <= 9
            return function(*args)

        return fast

    compiler._transform = transform
    call = compiler.compiled(lambda agent, rows, settings: calls.append("as it is"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(12):
            call(None, [torch.zeros(n % shapes)], None)
    said = [str(x.message) for x in caught]
    assert len(said) == (shapes == 1)
    assert all(
        "the same shapes again and again: a setting that the loss reads is a schedule; the run goes" in x for x in said
    )
    assert calls.count("as it is") == 12
    assert calls.count("compiled") == (5 if shapes == 1 else 12)


def test_an_error_of_the_loss_itself_is_its_own() -> None:
    def wrong(*args: Any) -> Any:
        raise ConfigError("advantage is missing")

    with warnings.catch_warnings(), pytest.raises(ConfigError, match="advantage is missing"):
        warnings.simplefilter("error")
        Compiler(Fake(0)).compiled(wrong)(None, None, None)


def test_a_memory_is_not_compiled(live: Any) -> None:
    with pytest.raises(ConfigError, match=r"run.compile=True with a memory:.*use run.compile=False"):
        live("ppo-lstm", compile=True)
    policies = ps.Policies({"a": ps.PPO(net=NET), "b": CASES["ppo-lstm"][1]}, {"x": "a", "y": "b"})
    spec = ps.SerialSampler(4, 4).build("CartPole-v1").spec
    built = policies.build({"a": spec, "b": spec})
    with pytest.raises(ConfigError, match="with a memory of policy 'b'"):
        compute(built, compiled=True)


@pytest.mark.usefixtures("there")
def test_every_policy_that_learns_computes_so() -> None:
    spec = ps.SerialSampler(4, 4).build("CartPole-v1").spec
    policies = ps.Policies({"a": ps.PPO(net=NET), "b": ps.PPO(net=NET)}, {"x": "a", "y": "b"}, policies_to_train=("a",))
    built = policies.build({"a": spec, "b": spec})
    before = {name: copy.copy(own) for name, own in built.items()}
    compute(built, "bf16", compiled=True)
    changed = {name for name, own in built.items() if own.loss_fn is not before[name].loss_fn}
    assert changed == {"a"}


def test_threads_are_not_timed_with_a_compiler() -> None:
    with pytest.raises(ConfigError, match=r"run.compile=True with learner_threads='auto'"):
        ps.RunConfig(compile=True, learner_threads="auto")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo", "td3"])
def test_torchs_compiler_computes_the_same(case: str, live: Any) -> None:
    """td3: an update's number, of which the loss takes the remainder, is not compiled anew each time."""
    plain, compiled = live(case), live(case, compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trained(plain, 4)
        trained(compiled, 4)
    named = dict(compiled.policy.agent.named_parameters())
    for name, x in plain.policy.agent.named_parameters():
        torch.testing.assert_close(x, named[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_machine_without_a_cpp_compiler_trains_without(
    live: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from torch._inductor import config

    torch._dynamo.reset()  # of what other tests compiled
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config.cpp, "cxx", (None, "/nowhere/g++"))
    plain = trained(live("ppo"), 2)
    with pytest.warns(UserWarning, match="InvalidCxxCompiler.*goes on without"):
        assert plain == trained(live("ppo", compile=True), 2)
