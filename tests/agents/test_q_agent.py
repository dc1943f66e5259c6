"""The agent of value learning: which action is chosen, what its heads add up to, what masks, memory and slots do."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.agents.networks import Net
from penstock.agents.noisy import noisy_layers
from penstock.agents.q_agent import QAgent
from penstock.algos.dqn import DQN
from penstock.algos.r2d1 import R2D1
from penstock.core.batch import Inputs, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_map

VECTOR = LeafSpec("box", (3,), "float32")
CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,), start=2)
MASK = LeafSpec("multi_binary", (4,), "int8")
SPEC, MASKED = EnvSpec(VECTOR, CHOICE), EnvSpec({"action_mask": MASK, "obs": VECTOR}, CHOICE)
NET = Net(hidden=(8,), activation="relu")


def inputs(n: int, mask: Tensor | None = None, seed: int = 0) -> Inputs:
    obs: Any = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    if mask is not None:
        obs = {"action_mask": mask, "obs": obs}
    return Inputs(obs, torch.full((n,), 2), torch.zeros(n), torch.zeros(n, dtype=torch.bool))


@pytest.mark.parametrize("dueling", [False, True])
def test_layers_start_as_torchs_own_so_that_q_of_small_observations_is_no_cone(dueling: bool) -> None:
    online = QAgent(SPEC, Net(hidden=(64, 64), activation="relu"), dueling=dueling).online
    for layer in online.modules():
        if isinstance(layer, torch.nn.Linear):
            assert 0.0 < float(layer.bias.abs().max()) <= layer.in_features**-0.5
            assert float(layer.weight.abs().max()) <= layer.in_features**-0.5


def act(agent: QAgent, x: Inputs, noise: Tensor | None) -> Tensor:
    with torch.inference_mode():
        action: Any = agent.act(x, None, noise)[0]
    return action


def test_without_noise_the_best_action_in_the_environments_numbers() -> None:
    agent, x = QAgent(SPEC, NET), inputs(64)
    assert torch.equal(act(agent, x, None), agent(x).argmax(-1) + 2)


@pytest.mark.parametrize("masked", [False, True])
def test_each_slot_explores_by_its_own_epsilon(masked: bool) -> None:
    """u < epsilon[slot] takes the floor(v * count)-th legal action; the slot is the last number of the noise."""
    agent = QAgent(MASKED if masked else SPEC, NET)
    agent.set_slots(3)
    agent.epsilon.copy_(torch.tensor([0.0, 0.5, 1.0]))
    rng, n = np.random.default_rng(0), 600
    mask = torch.from_numpy(rng.random((n, 4)) < 0.6)
    mask[:, 1] = True
    x = inputs(n, mask.to(torch.int8) if masked else None)
    noise = torch.from_numpy(rng.random((n, 3), np.float32))
    noise[:, 2] = torch.arange(n) % 3
    chosen, best = act(agent, x, noise), act(agent, x, None)
    for i in range(n):
        legal = [a for a in range(4) if mask[i, a] or not masked]
        explores = float(noise[i, 0]) < [0.0, 0.5, 1.0][i % 3]
        expected = legal[int(float(noise[i, 1]) * len(legal))] + 2 if explores else int(best[i])
        assert int(chosen[i]) == expected
        assert int(best[i]) - 2 in legal


def test_slots_beyond_those_of_the_run_explore_as_well() -> None:
    """A sampled evaluation may have more slots than training."""
    agent = QAgent(SPEC, NET)
    agent.set_slots(2)
    noise = torch.full((40, 3), 0.5)
    noise[:, 2] = torch.arange(40)
    agent.epsilon.copy_(torch.tensor([0.0, 1.0]))
    chosen, best = act(agent, inputs(40), noise), act(agent, inputs(40), None)
    assert torch.equal(chosen[::2], best[::2]) and chosen[1::2].tolist() == [4] * 20


@pytest.mark.parametrize("noisy", [False, True])
def test_evaluations_act_at_random_by_eps_eval_alone(noisy: bool) -> None:
    """Slots below 0 are those of a deterministic evaluation: neither epsilon nor noisy weights count there."""
    agent, x = QAgent(SPEC, NET, noisy=noisy, eps_eval=0.3), inputs(64)
    agent.renew_noise(np.random.default_rng(0))
    agent.epsilon.fill_(0.0)
    noise = torch.rand(64, 3)
    training, evaluation = noise.clone(), noise.clone()
    training[:, 2], evaluation[:, 2] = 0.0, -1.0
    greedy, random = act(agent, x, None), (noise[:, 1] * 4).long() + 2
    assert torch.equal(act(agent, x, evaluation), torch.where(noise[:, 0] < 0.3, random, greedy))
    assert torch.equal(act(agent, x, training), agent(x).argmax(-1) + 2)
    agent.epsilon.fill_(1.0)
    assert torch.equal(act(agent, x, training), random)


@pytest.mark.parametrize("masked", [False, True])
def test_the_network_is_not_asked_where_every_slot_explores(masked: bool) -> None:
    """Nor are actions others than where one slot does not."""
    agent, asked = QAgent(MASKED if masked else SPEC, NET), []
    x = inputs(9, torch.tensor([[1, 0, 1, 1]] * 9, dtype=torch.int8) if masked else None)
    noise = torch.rand(9, 3)
    noise[:, 2] = 0.0
    agent.online.register_forward_hook(lambda *_: asked.append(1))
    random = act(agent, x, noise)  # epsilon is 1 before it is set
    assert not asked
    noise[4, 0] = 1.0
    chosen = act(agent, x, noise)
    assert asked and torch.equal(chosen[:4], random[:4]) and torch.equal(chosen[5:], random[5:])
    assert int(chosen[4]) == int(act(agent, x, None)[4])


def test_the_mask_is_no_input_of_the_network() -> None:
    agent = QAgent(MASKED, NET)
    q = [agent(inputs(5, torch.full((5, 4), value, dtype=torch.int8))) for value in (0, 1)]
    assert torch.equal(*q)


def test_what_is_masked_is_neither_greedy_nor_the_largest() -> None:
    agent = QAgent(MASKED, NET, records_q=True)
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 1]], dtype=torch.int8)
    x, q = inputs(2, mask), torch.tensor([[1.0, 9.0, 3.0, 2.0], [8.0, 7.0, 6.0, -5.0]])
    assert agent.greedy(x, q).tolist() == [2, 3]
    assert agent.greedy(x, q * 1e3 - 1e10).tolist() == agent.greedy(x, q * 1e20 - 1e21).tolist() == [2, 3]
    with torch.inference_mode():
        info: Any = agent.act(x, None, None)[1]
        own = agent(x)
    assert float(info["q_max"][1]) == pytest.approx(float(own[1, 3])) == pytest.approx(float(info["q"][1]))
    assert float(info["q_max"][0]) == pytest.approx(max(float(own[0, a]) for a in (0, 2, 3)))


def test_recorded_values_are_of_the_action_taken() -> None:
    agent, x = QAgent(SPEC, NET, records_q=True), inputs(50)
    noise = torch.rand(50, 3)
    noise[:, 2] = 0.0
    with torch.inference_mode():
        action, info, _ = agent.act(x, None, noise)  # epsilon is 1 before it is set
    q, taken, recorded = agent(x), action - 2, info["q"]  # pyright: ignore
    torch.testing.assert_close(recorded, q.gather(1, taken.unsqueeze(1)).squeeze(1))
    torch.testing.assert_close(info["q_max"], q.max(1).values)
    assert QAgent(SPEC, NET).act(x, None, noise)[1] == {}


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("outputs", [1, 5])
def test_dueling_adds_a_value_and_centred_advantages(outputs: int, noisy: bool) -> None:
    agent, x = QAgent(SPEC, NET, dueling=True, outputs=outputs, noisy=noisy), inputs(6)
    agent.renew_noise(np.random.default_rng(0))
    network = agent.online
    assert network.value is not None
    features = network.mlp(x.obs)
    assert network.value_stream is not None and network.advantage_stream is not None
    value = network.value(network.value_stream(features)).reshape(6, 1, outputs)
    advantage = network.advantage(network.advantage_stream(features)).reshape(6, 4, outputs)
    expected = value + advantage - advantage.mean(1, keepdim=True)
    torch.testing.assert_close(agent(x), expected.squeeze(-1) if outputs == 1 else expected)
    torch.testing.assert_close(agent(x).mean(1), (value.squeeze(1).squeeze(-1) if outputs == 1 else value.squeeze(1)))


def widths(network: Any) -> tuple[list[int], list[int], list[int]]:
    """Units of the shared layers behind the encoder, of the value's stream and of the advantages'."""
    streams = (network.value_stream, network.advantage_stream)
    found = [
        [layer.weight.shape[0] for layer in part.layers] if part is not None else [] for part in (network.mlp, *streams)
    ]
    return found[0], found[1], found[2]


def test_each_stream_has_hidden_units_of_its_own() -> None:
    """The body's last layer, unless widths are given; 512 behind an image's convolutions, as in Wang et al. 2016."""
    net = Net(hidden=(8, 6), activation="relu")
    assert widths(QAgent(SPEC, net, dueling=True).online) == ([8], [6], [6])
    assert widths(QAgent(SPEC, net, dueling=True, noisy=True).online) == ([8], [6], [6])
    assert widths(QAgent(SPEC, net, dueling=True, dueling_hidden=()).online) == ([8, 6], [], [])
    assert widths(QAgent(SPEC, net, dueling=True, dueling_hidden=(5, 4)).online) == ([8, 6], [5, 4], [5, 4])
    memory = Net(hidden=(8,), activation="relu", recurrent="lstm", recurrent_size=7)
    assert widths(QAgent(SPEC, memory, dueling=True).online) == ([8], [7], [7])
    image = EnvSpec(LeafSpec("box", (4, 36, 36), "uint8"), CHOICE)
    network = QAgent(image, Net(cnn="nature", hidden=()), dueling=True).online
    assert widths(network) == ([], [512], [512])
    convolutions = (4 * 64 + 1) * 32 + (32 * 16 + 1) * 64 + (64 * 9 + 1) * 64
    assert sum(p.numel() for p in network.encoder.parameters()) == convolutions
    assert widths(QAgent(image, Net(cnn="nature", hidden=()), dueling=True, dueling_hidden=()).online)[1] == []


@pytest.mark.parametrize("kind", [DQN, R2D1])
def test_streams_without_units_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"dueling_hidden=\(8, 0\); expected 1 or more"):
        kind(dueling_hidden=(8, 0))


def test_dueling_represents_a_value_that_no_advantage_shares() -> None:
    """Changing the value's hidden units moves every action's Q alike, which one shared layer could not."""
    agent, x = QAgent(SPEC, NET, dueling=True), inputs(6)
    before = agent(x)
    agent.online.value_stream.layers[0].weight.data.normal_()  # pyright: ignore
    moved = (agent(x) - before).detach()
    assert moved.abs().max() > 1e-3
    torch.testing.assert_close(moved, moved[:, :1].expand_as(moved), rtol=0, atol=1e-5)


def test_noisy_layers_reach_into_the_streams_and_start_at_the_sigma_asked_for() -> None:
    net = Net(hidden=(8, 6), activation="relu")
    layers = list(noisy_layers(QAgent(SPEC, net, dueling=True, noisy=True, noisy_sigma=0.1).online))
    assert len(layers) == 5 and [layer.weight.shape[1] for layer in layers] == [3, 8, 8, 6, 6]
    for layer in layers:
        assert layer.weight_sigma[0, 0].item() == pytest.approx(0.1 / layer.weight.shape[1] ** 0.5)
    plain = next(noisy_layers(QAgent(SPEC, net, noisy=True).online))
    assert plain.weight_sigma[0, 0].item() == pytest.approx(0.5 / 3**0.5)


def test_actions_and_atoms_are_not_mixed_up() -> None:
    """Output a * K + k is atom k of action a."""
    agent, x = QAgent(SPEC, NET, outputs=5), inputs(3)
    flat = agent.online.advantage(agent.online.mlp(x.obs))
    assert torch.allclose(agent(x)[1, 2, 4], flat[1, 2 * 5 + 4], atol=1e-6)


def test_what_is_expected_of_atoms_and_quantiles() -> None:
    agent = QAgent(SPEC, NET, outputs=3)
    out = torch.tensor([[[1.0, 2.0, 6.0]]])
    assert agent.expected(out).tolist() == [[3.0]]
    agent.atoms = torch.tensor([-1.0, 0.0, 2.0])
    logits = torch.tensor([[[0.25, 0.25, 0.5]]]).log() + 7.0
    torch.testing.assert_close(agent.expected(logits), torch.tensor([[0.75]]))
    assert QAgent(SPEC, NET).expected(out) is out


def test_targets_start_as_copies_and_move_by_tau() -> None:
    agent, x = QAgent(SPEC, NET, dueling=True), inputs(5)
    assert torch.equal(agent.bootstrap(x), agent(x))
    before = [p.clone() for p in agent.target.parameters()]
    for p in agent.online.parameters():
        p.data += 1.0
    assert not torch.equal(agent.bootstrap(x), agent(x))
    for _ in range(2):
        agent.update_target(0.25)
    for now, old in zip(agent.target.parameters(), before):
        torch.testing.assert_close(now, old + 0.4375)
    agent.update_target(1.0)
    assert torch.equal(agent.bootstrap(x), agent(x))
    assert not any(p.requires_grad for p in agent.target.parameters())


def test_noise_of_both_networks_is_drawn_apart() -> None:
    agent, x = QAgent(SPEC, NET, noisy=True), inputs(5)
    before = agent(x)
    agent.renew_noise(np.random.default_rng(0))
    assert not torch.equal(agent(x), before)
    pairs = list(zip(noisy_layers(agent.online), noisy_layers(agent.target)))
    assert len(pairs) == 2 and all(own.noise_in.any() and other.noise_in.any() for own, other in pairs)
    assert not any(torch.equal(own.noise_in, other.noise_in) for own, other in pairs)
    plain = QAgent(SPEC, NET)
    state = {k: v.clone() for k, v in plain.state_dict().items()}
    plain.renew_noise(np.random.default_rng(0))
    assert all(torch.equal(v, state[k]) for k, v in plain.state_dict().items())


def test_memory_is_cleared_where_an_episode_begins() -> None:
    """Acting step by step gives what one pass over the sequence gives, in which `first` clears the state."""
    net = Net(hidden=(8,), recurrent="lstm", recurrent_size=4, prev_action=True, prev_reward=True)
    agent = QAgent(SPEC, net, records_q=True)
    T, B, rng = 7, 3, torch.Generator().manual_seed(0)
    first = torch.rand(T, B, generator=rng) < 0.3
    whole = Inputs(torch.randn(T, B, 3, generator=rng), torch.randint(2, 6, (T, B), generator=rng),
                   torch.randn(T, B, generator=rng), first)  # fmt: skip
    state = agent.initial_state(B)
    q = agent(whole, state)
    for t in range(T):
        step = Inputs(*(tree_map(lambda x, t=t: x[t], part) for part in whole))
        with torch.inference_mode():
            action, info, state = agent.act(step, state, None)
        torch.testing.assert_close(info["q_max"], q[t].max(-1).values)
        assert torch.equal(action, q[t].argmax(-1) + 2)  # pyright: ignore
    assert agent.fed == {"prev_action", "prev_reward", "first"} and QAgent(SPEC, NET).fed == frozenset()


def test_observations_are_normalised_and_masks_are_not() -> None:
    agent = QAgent(MASKED, Net(hidden=(8,), normalize_obs=True, normalize_reward=True), discount=0.5)
    batch = allocate_batch(MASKED, BatchSpec(4, 2))
    batch.obs["obs"][...] = np.arange(5)[:, None, None] * 10.0
    batch.valid[...] = True
    batch.prev_reward[1:] = 3.0
    agent.observe(tree_map(torch.from_numpy, batch))
    shown: Any = agent.prepared({"obs": torch.tensor([[15.0, 15.0, 15.0]]), "action_mask": torch.ones(1, 4)})
    assert shown["obs"].abs().max() < 1e-6 and set(shown) == {"obs"}
    assert float(agent.scaled_reward(torch.tensor(1.0))) == pytest.approx(1 / np.std([3.0, 4.5, 5.25, 5.625]), rel=1e-4)


def test_an_info_may_stand_for_a_terminal_state() -> None:
    agent = QAgent(SPEC, Net(terminal_info="life_lost"))
    batch = allocate_batch(SPEC, BatchSpec(3, 1), env_info=["life_lost"])
    batch.info["env"]["life_lost"][1] = 1.0
    batch.terminated[2] = True
    shown = tree_map(torch.from_numpy, batch)
    assert agent.terminal(shown)[:, 0].tolist() == [False, True, True]
    assert QAgent(SPEC, NET).terminal(shown)[:, 0].tolist() == [False, False, True]


def test_parameters_of_a_run_with_other_slots_are_taken() -> None:
    one, other = QAgent(SPEC, NET), QAgent(SPEC, NET)
    one.set_slots(6)
    other.set_slots(2)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(inputs(3)), one(inputs(3)))
    other.set_slots(2)
    assert other.epsilon.shape == (2,)


@pytest.mark.parametrize(
    ("spec", "changes", "words"),
    [
        (EnvSpec(VECTOR, VECTOR), {}, ["one discrete action", "box[3]", "SAC"]),
        (EnvSpec(VECTOR, (CHOICE, CHOICE)), {}, ["one discrete action", "PPO"]),
        (EnvSpec(VECTOR, LeafSpec("multi_discrete", (2,), "int64", sizes=(3, 3))), {}, ["multi_discrete"]),
        (EnvSpec({"action_mask": LeafSpec("multi_binary", (5,), "int8"), "obs": VECTOR}, CHOICE), {}, ["5 elements", "4 discrete choices"]),
        (SPEC, {"net": Net(recurrent="gru"), "noisy": True}, ["noisy=True", "recurrent"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(spec: EnvSpec, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make: Any = partial(QAgent, spec)
        make(**{"net": NET, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_deterministic_action_of_noisy_layers_is_that_of_the_mean_weights() -> None:
    torch.manual_seed(0)
    agent, x = QAgent(SPEC, NET, noisy=True), inputs(200)
    still = act(agent, x, None)
    agent.renew_noise(np.random.default_rng(0))
    assert torch.equal(act(agent, x, None), still)
    never = torch.tensor([1.0, 0.0, 0.0]).expand(200, 3)  # no slot's epsilon is above 1
    assert not torch.equal(act(agent, x, never), still)
