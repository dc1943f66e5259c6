"""Every built-in agent is an honest `nn.Module`: whatever torch does to modules acts on what the agent computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize, prune

import penstock as ps
from penstock.agents.noisy import NoisyLinear
from penstock.core.batch import Inputs
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves, tree_map

VECTOR = LeafSpec("box", (3,), "float32", -5.0, 5.0)
IMAGE = LeafSpec("box", (36, 36, 1), "uint8", 0.0, 255.0)
CHOICE = LeafSpec("discrete", (), "int64", sizes=(3,))
BOX = LeafSpec("box", (2,), "float32", -1.0, 1.0)
SMALL: Any = {"hidden": (8, 6), "activation": "relu"}
MEMORY: Any = {**SMALL, "recurrent_size": 5, "prev_action": True, "prev_reward": True}
N = 6

AGENTS: dict[str, tuple[EnvSpec, Any]] = {
    "ppo-mlp": (EnvSpec(VECTOR, CHOICE), ps.PPO(net=ps.Net(hidden=(8, 6)))),
    "ppo-box": (EnvSpec(VECTOR, BOX), ps.PPO(net=ps.Net(hidden=(8,), normalize_obs=True, squash=True))),
    "ppo-cnn": (EnvSpec(IMAGE, CHOICE), ps.PPO(net=ps.Net(**SMALL))),
    "ppo-lstm": (EnvSpec(VECTOR, CHOICE), ps.PPO(net=ps.Net(**MEMORY, recurrent="lstm"))),
    "ppo-gru": (EnvSpec(VECTOR, BOX), ps.PPO(net=ps.Net(**MEMORY, recurrent="gru"))),
    "dqn": (EnvSpec(VECTOR, CHOICE), ps.DQN(net=ps.Net(**SMALL))),
    "rainbow": (
        EnvSpec(VECTOR, CHOICE),
        ps.DQN(net=ps.Net(**SMALL), dueling=True, noisy=True, distributional="c51", n_atoms=5),
    ),
    "dueling": (EnvSpec(VECTOR, CHOICE), ps.DQN(net=ps.Net(**SMALL), dueling=True)),
    "r2d1": (EnvSpec(VECTOR, CHOICE), ps.R2D1(net=ps.Net(**MEMORY, recurrent="lstm"))),
    "sac": (EnvSpec(VECTOR, BOX), ps.SAC(net=ps.Net(**SMALL))),
    "td3": (EnvSpec(VECTOR, BOX), ps.TD3(net=ps.Net(**SMALL))),
    "discrete-sac": (EnvSpec(VECTOR, CHOICE), ps.DiscreteSAC(net=ps.Net(**SMALL))),
}


class Answers(nn.Module):
    """All that an agent computes, as a tuple of tensors: a wrapper as a user would write it."""

    def __init__(self, agent: Any) -> None:
        super().__init__()
        self.agent = agent

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        x, state = Inputs(*inputs[:4]), inputs[4] if len(inputs) > 4 else None
        action, info, state = self.agent.act(x, state, None)
        answers = [*tree_leaves((action, info, state))]
        if isinstance(self.agent, ps.ActorCritic):
            rows = Inputs(*(tree_map(lambda a: a.unsqueeze(0), part) for part in x)) if state is not None else x
            out = self.agent(rows, inputs[4] if len(inputs) > 4 else None)
            answers += [
                out.value,
                out.dist.entropy(),
                *(getattr(out.dist, k) for k in ("mean", "logp") if hasattr(out.dist, k)),
            ]
        elif not isinstance(self.agent, ps.QAgent):
            answers += [self.agent(x)]
            if hasattr(self.agent, "box"):
                unit = 0.3 * torch.ones_like(x.obs[:, :2])  # no number of rows, which a trace would keep
                answers += [self.agent.q(x, unit), self.agent.smallest_q(x, unit), self.agent.target_q(x, unit)]
            else:
                answers += [self.agent.q(x), self.agent.target_q(x)]
        elif state is None:
            answers += [self.agent(x), self.agent.bootstrap(x)]
        else:
            rows = Inputs(*(tree_map(lambda a: a.unsqueeze(0), part) for part in x))
            answers += [self.agent(rows, inputs[4]), self.agent.bootstrap(rows, inputs[4])]
        return tuple(answers)


def made(name: str, seed: int = 0) -> Answers:
    spec, settings = AGENTS[name]
    agent = settings.build(spec, seed=seed).agent
    with torch.no_grad():
        for layer in agent.modules():  # the first policy is nearly uniform: changes must show
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight)
    return Answers(agent)


def inputs_for(name: str, n: int = N, seed: int = 1) -> tuple[Any, ...]:
    spec, settings = AGENTS[name]
    g = torch.Generator().manual_seed(seed)
    obs = torch.rand(n, *spec.obs.shape, generator=g)
    obs = (obs * 255).to(torch.uint8) if spec.obs.is_image else obs * 4 - 2
    action = torch.rand(n, 2, generator=g) if spec.action.kind == "box" else torch.randint(0, 3, (n,), generator=g)
    first = torch.arange(n) % 3 == 0
    given = (obs, action, torch.rand(n, generator=g), first)
    if not settings.net.is_recurrent:
        return given
    size = settings.net.recurrent_size
    state = {k: torch.rand(n, size, generator=g) for k in (("h", "c") if settings.net.recurrent == "lstm" else "h")}
    return (*given, state)


def layers_of(answers: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, layer) of each Linear and noisy Linear of networks that are no targets."""
    return [
        (parent, name, layer)
        for where, parent in answers.named_modules()
        for name, layer in parent.named_children()
        if isinstance(layer, (nn.Linear, NoisyLinear)) and "target" not in f"{where}.{name}"
    ]


def weights_of(answers: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, name) of each weight that is no target's, of convolutions, cells and stacked critics too."""
    return [
        (module, name)
        for where, module in answers.named_modules()
        for name, p in module.named_parameters(recurse=False)
        if "weight" in name and "sigma" not in name and "target" not in where and p.dim() > 1
    ]


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...], tolerance: float = 1e-5) -> bool:
    return len(a) == len(b) and all(torch.allclose(x.float(), y.float(), tolerance, tolerance) for x, y in zip(a, b))


def differs(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return not same(a, b, 1e-6)


def zeroed(answers: Answers, names: list[str]) -> Answers:
    other = copy.deepcopy(answers)
    for name in names:
        other.get_parameter(name).data.zero_()
    return other


def state_of(answers: Answers) -> dict[str, Tensor]:
    return {**dict(answers.named_parameters()), **dict(answers.named_buffers())}


def by_functional_call(name: str) -> None:
    answers, other, x = made(name), made(name, seed=1), inputs_for(name)
    before = answers(*x)
    swapped = functional_call(answers, state_of(other), x)
    assert same(swapped, other(*x)) and differs(swapped, before)
    zeros = {key: torch.zeros_like(p) for key, p in answers.named_parameters()}
    assert same(functional_call(answers, zeros, x), zeroed(answers, list(zeros))(*x))
    assert same(answers(*x), before, 0.0)


def by_assignment(name: str) -> None:
    answers, other, x = made(name), made(name, seed=1), inputs_for(name)
    answers.load_state_dict(other.state_dict(), assign=True)
    assert same(answers(*x), other(*x), 0.0)
    for p in other.parameters():  # they are the very parameters
        p.data.zero_()
    assert same(answers(*x), other(*x), 0.0)


def by_pruning(name: str) -> None:
    answers, x = made(name), inputs_for(name)
    before = answers(*x)
    paths = {m: path for path, m in answers.named_modules()}
    weights = [(m, n) for m, n in weights_of(answers) if not m._parameters[n].is_sparse]  # pyright: ignore
    expected = zeroed(answers, [f"{paths[m]}.{n}" for m, n in weights])(*x)
    for module, weight in weights:
        prune.l1_unstructured(module, weight, amount=1.0)
    assert same(answers(*x), expected) and differs(expected, before)
    for module, weight in weights:
        prune.remove(module, weight)
    assert same(answers(*x), expected)


class Half(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 0.5 * w


def by_parametrisation(name: str) -> None:
    answers, x = made(name), inputs_for(name)
    before, expected = answers(*x), copy.deepcopy(answers)
    for module, weight in weights_of(expected):
        module.get_parameter(weight).data.mul_(0.5)
    for module, weight in weights_of(answers):
        parametrize.register_parametrization(module, weight, Half())
    assert same(answers(*x), expected(*x)) and differs(answers(*x), before)
    for norm in (parametrizations.spectral_norm, parametrizations.weight_norm):
        answers = made(name)
        expected = copy.deepcopy(answers)
        for (_, _, layer), (_, _, plain) in zip(layers_of(answers), layers_of(expected), strict=True):
            norm(layer, "weight").eval()
            for p in layer.parametrizations.parameters():  # pyright: ignore
                p.data.mul_(1.5 if norm is parametrizations.spectral_norm or p.shape[-1] == 1 else 1.0)
            plain.weight.data.copy_(layer.weight)  # pyright: ignore
        assert same(answers(*x), expected(*x))


def by_hooks(name: str) -> None:
    answers, x = made(name), inputs_for(name)
    before = answers(*x)
    fired: dict[str, set[int]] = {"before": set(), "after": set(), "backward": set()}
    layers = [layer for _, _, layer in layers_of(answers)]
    whole = ("critics.stack", "mlp", "encoder.images.0", "memory.cell")
    layers += [m for path, m in answers.named_modules() if path.endswith(whole) and "target" not in path]
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda m, a, i=i: fired["before"].add(i))
        layer.register_forward_hook(lambda m, a, out, i=i: fired["after"].add(i))
    assert same(answers(*x), before, 1e-6)
    assert fired["before"] == fired["after"] == set(range(len(layers)))
    for i, layer in enumerate(layers):
        layer.register_full_backward_hook(lambda m, a, b, i=i: fired["backward"].add(i))
    torch.stack([a.sum() for a in answers(*x) if a.requires_grad]).sum().backward()
    assert fired["backward"] == set(range(len(layers)))
    layers[0].register_forward_hook(lambda m, a, out: 0.25 * out)
    assert differs(answers(*x), before)


class LoRA(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        outputs, inputs = layer.weight.shape
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def by_replacement(name: str) -> None:
    answers, x = made(name), inputs_for(name)
    before, expected = answers(*x), copy.deepcopy(answers)
    for (parent, key, layer), (_, _, plain) in zip(layers_of(answers), layers_of(expected), strict=True):
        adapted = LoRA(layer)
        setattr(parent, key, adapted)
        plain.weight.data += (adapted.up.weight @ adapted.down.weight).detach()  # pyright: ignore
    assert same(answers(*x), expected(*x), 1e-4) and differs(answers(*x), before)
    for path, m in list(answers.named_modules()):
        if path.endswith("critics.stack"):
            answers.get_submodule(path.rpartition(".")[0]).stack = nn.Sequential(m, Half())
    if hasattr(answers.agent, "critics"):
        values = -3 if hasattr(answers.agent, "box") else -2
        assert same(answers(*x)[values:], tuple(0.5 * q for q in expected(*x)[values:]), 1e-4)


@pytest.mark.filterwarnings("ignore")
def by_quantisation(name: str) -> None:
    answers, x = made(name), inputs_for(name)
    small = torch.ao.quantization.quantize_dynamic(answers)
    kinds = (nn.Linear, nn.LSTM, nn.GRU)
    if any(isinstance(m, kinds) for m in answers.modules()):  # noisy layers alone are none that torch quantises
        assert not any(type(m) in kinds for m in small.modules())
        assert differs(small(*x), answers(*x))
    floats = [(a, b) for a, b in zip(small(*x), answers(*x)) if a.is_floating_point()]
    assert all(torch.allclose(a, b, 0.2, 0.2) for a, b in floats)


def by_copying(name: str) -> None:
    answers, x = made(name), inputs_for(name)
    before, other = answers(*x), copy.deepcopy(answers)
    assert same(other(*x), before, 0.0)
    for p in other.parameters():
        p.data.zero_()
    assert same(answers(*x), before, 0.0) and differs(other(*x), before)


def by_mapping(name: str) -> None:
    """Each of three agents stacked, as if it were alone; and gradients by transforms are those of autograd."""
    each, x = [made(name, seed) for seed in range(3)], inputs_for(name)
    stacked, buffers = stack_module_state(each)  # pyright: ignore
    out = vmap(lambda p, b: functional_call(each[0], (p, b), x))(stacked, buffers)
    for i, one in enumerate(each):
        assert same(tuple(a[i] for a in out), one(*x))
    parameters = {key: p.detach() for key, p in each[0].named_parameters()}

    def total(p: Any) -> Tensor:
        return torch.stack([a.square().sum() for a in functional_call(each[0], p, x) if a.requires_grad]).sum()

    given = {key: p.clone().requires_grad_() for key, p in parameters.items()}
    by_autograd = torch.autograd.grad(total(given), list(given.values()), allow_unused=True)
    for (key, g), a in zip(torch.func.grad(total)(parameters).items(), by_autograd):
        assert torch.allclose(g, torch.zeros_like(g) if a is None else a, 1e-3, 1e-4), key


def by_tracing(name: str) -> None:
    answers, x, more = made(name), inputs_for(name), inputs_for(name, 9, seed=2)
    traced = torch.jit.trace(answers, x, check_trace=False)
    assert same(traced(*more), answers(*more))


def by_compiling(name: str) -> None:
    answers, x = made(name), inputs_for(name)
    torch.compiler.reset()
    compiled = torch.compile(answers, backend="eager", dynamic=True)
    assert same(compiled(*x), answers(*x))
    for p in answers.parameters():
        p.data.mul_(0.5)
    more = inputs_for(name, 9, seed=2)
    assert same(compiled(*more), answers(*more))


def exported(module: nn.Module, x: Any, more: Any, packed: bool) -> None:
    """Exported with a batch of any size, and run on another one."""
    any_n = torch.export.Dim.DYNAMIC
    shapes = tuple(tree_map(lambda a: {0: any_n}, part) for part in x)
    out = torch.export.export(module, x, dynamic_shapes=(shapes,) if packed else shapes).module()(*more)
    assert same(tuple(tree_leaves(out)), tuple(tree_leaves(module(*more))))


def by_export(name: str) -> None:
    exported(made(name), inputs_for(name), inputs_for(name, 9, seed=2), True)


def acting(name: str, n: int, seed: int) -> tuple[Any, ...]:
    """Inputs of an ExportableAgent."""
    obs, action, reward, first, *state = inputs_for(name, n, seed)
    return (obs, *state, first, action, reward) if state else (obs,)


def by_acting_export(name: str) -> None:
    exported(ps.ExportableAgent(made(name).agent), acting(name, N, 1), acting(name, 9, 2), False)


def by_onnx(name: str) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    module, x, more = ps.ExportableAgent(made(name).agent), acting(name, N, 1), acting(name, 9, 2)
    shapes = tuple(tree_map(lambda a: {0: torch.export.Dim.DYNAMIC}, part) for part in x)
    program = torch.onnx.export(module, x, dynamo=True, dynamic_shapes=shapes)
    assert program is not None
    out = tuple(torch.as_tensor(a) for a in program(*more))
    assert same(out, tuple(torch.utils._pytree.tree_leaves(module(*more))), 1e-4)  # of a state h, then c


TOOLS: dict[str, Callable[[str], None]] = {
    "functional_call": by_functional_call,
    "assign": by_assignment,
    "prune": by_pruning,
    "parametrize": by_parametrisation,
    "hooks": by_hooks,
    "lora": by_replacement,
    "quantize": by_quantisation,
    "deepcopy": by_copying,
    "vmap": by_mapping,
    "jit.trace": by_tracing,
    "compile": by_compiling,
    "export": by_export,
    "export acting": by_acting_export,
    "onnx": by_onnx,
}
LONG = ("compile", "export", "export acting", "onnx", "vmap", "jit.trace")
QUICK = {("dqn", "export"), ("sac", "vmap"),
         ("r2d1", "jit.trace")}  # fmt: skip
CASES = [
    pytest.param(
        name, tool, marks=[pytest.mark.slow] if tool in LONG and (name, tool) not in QUICK else [], id=f"{name}-{tool}"
    )
    for name in AGENTS
    for tool in TOOLS
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "tool"), CASES)
def test_what_torch_does_to_a_module_acts_on_what_the_agent_computes(name: str, tool: str) -> None:
    TOOLS[tool](name)
