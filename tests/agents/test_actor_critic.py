import copy
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.agents.actor_critic import ActionHead, ActorCritic, actor_critic
from penstock.agents.networks import Net
from penstock.core.batch import Inputs, SampleBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves, tree_map

VECTOR = LeafSpec("box", (3,), "float32")
IMAGE = LeafSpec("box", (3, 36, 36), "uint8", 0.0, 255.0)
CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,), start=-1)
CHOICES = LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 3), start=(0, 5))
BITS = LeafSpec("multi_binary", (2, 2), "int8")
BOX = LeafSpec("box", (2,), "float32", low=-3.0, high=(5.0, 1.0))
SCALAR = LeafSpec("box", (), "float32", -2.0, 2.0)
FREE = LeafSpec("box", (2,), "float32")
HALF_FREE = LeafSpec("box", (2,), "float64", low=0.0)

OBSERVATIONS = {
    "vector": VECTOR,
    "choice": CHOICE,
    "choices": CHOICES,
    "bits": BITS,
    "scalar": SCALAR,
    "image": IMAGE,
    "nested": {"a": VECTOR, "b": (CHOICE, BITS)},
}
ACTIONS = {
    "choice": CHOICE,
    "choices": CHOICES,
    "bits": BITS,
    "box": BOX,
    "scalar": SCALAR,
    "free": FREE,
    "half free": HALF_FREE,
    "nested": {"z": BOX, "a": (CHOICE, BITS), "m": CHOICES, "s": SCALAR},
}
NETS = {
    "plain": Net(hidden=(16,)),
    "shared": Net(hidden=(16,), shared=True),
    "lstm": Net(hidden=(16,), recurrent="lstm", recurrent_size=8, prev_action=True, prev_reward=True),
    "gru": Net(hidden=(16,), recurrent="gru", recurrent_size=8),
    "normalized": Net(hidden=(16,), normalize_obs=True, normalize_reward=True),
}


def values_of(leaf: LeafSpec, lead: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    shape = (*lead, *leaf.shape)
    if leaf.sizes:
        start = np.broadcast_to(np.asarray(leaf.start), len(leaf.sizes)).reshape(leaf.shape)
        drawn = np.stack([rng.integers(0, n, size=lead) for n in leaf.sizes], -1).reshape(shape) + start
    elif leaf.kind == "multi_binary":
        drawn = rng.integers(0, 2, size=shape)
    elif leaf.dtype == "uint8":
        drawn = rng.integers(0, 256, size=shape)
    else:
        drawn = rng.normal(size=shape)
    return torch.from_numpy(np.asarray(drawn).astype(leaf.dtype))


def inputs_for(spec: EnvSpec, *lead: int, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)

    def draw(leaf: LeafSpec) -> Tensor:
        return values_of(leaf, lead, rng)

    return Inputs(
        tree_map(draw, spec.obs),
        tree_map(draw, spec.action),
        torch.from_numpy(rng.normal(size=lead).astype(np.float32)),
        torch.from_numpy(rng.random(lead) < 0.2),
    )


def noise_for(agent: ActorCritic, *lead: int) -> Tensor:
    size = (*lead, agent.noise_size)
    return (torch.randint(0, 2**23, size, generator=torch.Generator().manual_seed(1)).float() + 0.5) * 2.0**-23


def legal(leaf: LeafSpec, action: Tensor) -> bool:
    if leaf.sizes:
        low = torch.tensor(leaf.start).expand(len(leaf.sizes))
        flat = action.reshape(len(action), -1)
        return bool(((flat >= low) & (flat < low + torch.tensor(leaf.sizes))).all())
    return leaf.kind == "box" or bool(((action == 0) | (action == 1)).all())


def batch_of(agent: ActorCritic, T: int, B: int, seed: int = 0) -> SampleBatch:
    """A batch of tensors filled with what the agent would meet."""
    x, rng = inputs_for(agent.spec, T + 1, B, seed=seed), np.random.default_rng(seed)
    ended = torch.from_numpy(rng.random((T, B)) < 0.2)
    state = tree_map(lambda s: s + 0.5, agent.initial_state(B))
    return SampleBatch(
        obs=x.obs,
        first=x.first,
        prev_action=x.prev_action,
        prev_reward=x.prev_reward,
        terminated=ended,
        truncated=torch.zeros_like(ended),
        valid=~ended.roll(1, 0),
        info={},
        state=state,
        version=torch.zeros(T, B),
    )


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(("obs", "action"), [
    *((o, "nested") for o in OBSERVATIONS), *(("nested", a) for a in ACTIONS), *(("vector", a) for a in ACTIONS)
])  # fmt: skip
def test_any_spaces_with_any_net(net: str, obs: str, action: str):
    spec = EnvSpec(OBSERVATIONS[obs], ACTIONS[action])
    agent, B = ActorCritic(spec, NETS[net]), 4
    batch = batch_of(agent, 3, B)
    agent.observe(batch)
    x = inputs_for(spec, B)
    state = agent.initial_state(B)
    with torch.inference_mode():
        for noise in (noise_for(agent, B), None):
            chosen, info, new = agent.act(x, state, noise)
            leaves = tree_leaves(spec.action)
            assert len(tree_leaves(chosen)) == len(leaves)
            for leaf, a in zip(leaves, tree_leaves(chosen)):
                assert a.shape == (B, *leaf.shape)
                assert a.dtype.is_floating_point == (leaf.kind == "box")
                assert legal(leaf, a)
            assert list(info) == ["logp"]
            assert info["logp"].shape == (B,)
            assert info["logp"].dtype == torch.float32
            assert torch.isfinite(info["logp"]).all()
            assert tree_map(lambda s: s.shape, new) == tree_map(lambda s: s.shape, state)
    values = agent.values(batch)
    assert values.shape == (4, B)
    assert not values.requires_grad
    lead = (3, B) if agent.memory else (12,)
    sequence = tree_map(lambda v: v[:-1] if agent.memory else v[:-1].flatten(0, 1), tuple(batch.inputs))
    dist, value = agent(Inputs(*sequence), batch.state)
    taken = tree_map(lambda a: a if agent.memory else a.flatten(0, 1), batch.action)
    assert value.shape == dist.log_prob(taken).shape == dist.entropy().shape == lead
    loss = value.sum() + dist.log_prob(taken).sum() + dist.entropy().sum()
    loss.backward()
    for name, parameter in agent.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("net", NETS)
def test_values_are_those_of_the_forward(net: str):
    agent = ActorCritic(EnvSpec(OBSERVATIONS["nested"], ACTIONS["nested"]), NETS[net])
    batch = batch_of(agent, 7, 4)
    agent.observe(batch)
    values = agent.values(batch)

    def forward() -> Tensor:
        if agent.memory:
            return agent(batch.inputs, batch.state).value
        return agent(batch.inputs.flat()).value.reshape(8, 4)

    with torch.no_grad():
        assert torch.equal(values, forward())
    assert values.std() > 0
    # With gradients oneDNN multiplies an LSTM's matrices by another kernel where the processor has no AVX-512: by
    # `brgemm:avx2` for prop kind forward_inference, by a plain one for forward_training (ONEDNN_VERBOSE=all shows it).
    ulps = 8 * 2.0**-24 if net == "lstm" else 0.0
    torch.testing.assert_close(values, forward().detach(), rtol=0.0, atol=ulps)


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("net", ["plain", "shared", "normalized"])
def test_what_was_recorded_is_what_the_learner_computes(net: str, squash: bool):
    """The first ratio of PPO is then exactly 1. Feed-forward, bit for bit, whatever number of rows from four on."""
    action = {"a": CHOICE, "b": BITS, "c": CHOICES, "d": BOX, "e": SCALAR}
    settings = {**vars(NETS[net]), "squash": squash}
    agent = ActorCritic(EnvSpec(VECTOR, action), Net(**settings))
    agent.observe(batch_of(agent, 6, 4))
    x = inputs_for(agent.spec, 24)
    with torch.inference_mode():
        chosen, info, _ = agent.act(x, None, noise_for(agent, 24))
    for start, stop in ((0, 24), (0, 4), (4, 12), (8, 24), (0, 20)):
        part = Inputs(*tree_map(lambda v, a=start, b=stop: v[a:b], tuple(x)))
        dist, _ = agent(part)
        taken = tree_map(lambda v, a=start, b=stop: v[a:b].clone(), chosen)
        assert torch.equal(dist.log_prob(taken), info["logp"][start:stop])


@pytest.mark.parametrize("net", ["lstm", "gru"])
def test_acting_step_by_step_is_the_unroll(net: str):
    agent = ActorCritic(EnvSpec(VECTOR, CHOICE), NETS[net])
    x, noise = inputs_for(agent.spec, 9, 4), noise_for(agent, 9, 4)
    x.first[0] = False
    state = start = tree_map(lambda s: s + 0.5, agent.initial_state(4))
    actions, logps = [], []
    with torch.inference_mode():
        for t in range(9):
            chosen, info, state = agent.act(Inputs(*tree_map(lambda v, t=t: v[t], tuple(x))), state, noise[t])
            actions.append(chosen)
            logps.append(info["logp"])
    dist, _ = agent(x, start)
    torch.testing.assert_close(dist.log_prob(torch.stack(actions).clone()), torch.stack(logps), rtol=1e-5, atol=1e-6)
    assert agent.act(Inputs(*tree_map(lambda v: v[0], tuple(x))), start, None)[0].shape == (4,)


def test_an_opening_row_forgets_state_action_and_reward():
    agent = ActorCritic(EnvSpec(VECTOR, CHOICE), NETS["lstm"])
    x = inputs_for(agent.spec, 4)
    opening = x._replace(first=torch.ones(4, dtype=torch.bool))
    other = opening._replace(prev_action=x.prev_action.flip(0), prev_reward=x.prev_reward + 5)
    a = agent.act(opening, agent.initial_state(4), None)
    b = agent.act(other, tree_map(lambda s: s + 3, agent.initial_state(4)), None)
    assert torch.equal(a[1]["logp"], b[1]["logp"])
    assert all(torch.equal(p, q) for p, q in zip(tree_leaves(a[2]), tree_leaves(b[2])))
    going_on = x._replace(first=torch.zeros(4, dtype=torch.bool))
    for field in ({"prev_reward": x.prev_reward + 5}, {"prev_action": -1 + (x.prev_action + 2) % 4}):
        changed = agent.act(going_on._replace(**field), agent.initial_state(4), None)
        assert not torch.equal(changed[1]["logp"], agent.act(going_on, agent.initial_state(4), None)[1]["logp"])


BIT_CASES = {
    "mlp": (VECTOR, BOX, Net()),
    "odd mlp": (VECTOR, CHOICE, Net(hidden=(13, 7))),
    "relu": (VECTOR, CHOICES, Net(hidden=(32, 32), activation="relu", shared=True)),
    "normalized": (VECTOR, CHOICE, Net(hidden=(16,), normalize_obs=True)),
    "squashed": (VECTOR, BOX, Net(hidden=(16,), squash=True)),
    "many": (OBSERVATIONS["nested"], ACTIONS["nested"], Net(hidden=(16,))),
    "lstm": (VECTOR, CHOICE, Net(recurrent="lstm")),
    "odd lstm": (VECTOR, CHOICE, Net(hidden=(9,), recurrent="lstm", recurrent_size=17)),
    "gru": (VECTOR, CHOICE, Net(recurrent="gru")),
    "odd gru": (VECTOR, CHOICE, Net(hidden=(9,), recurrent="gru", recurrent_size=17)),
    "nature": (LeafSpec("box", (4, 84, 84), "uint8"), CHOICE, Net()),
    "impala": (LeafSpec("box", (16, 16, 3), "uint8"), CHOICE, Net(cnn="impala")),
}


@pytest.mark.parametrize("case", BIT_CASES)
def test_a_row_acts_the_same_whatever_lies_beside_it(case: str):
    """4, 8, 16 or 32 rows at once: the same bits, so that workers may share the slots out in any way."""
    obs, action, net = BIT_CASES[case]
    agent = ActorCritic(EnvSpec(obs, action), net)
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(torch.randn_like(p) * 0.1)  # away from the special start
    if net.normalize_obs:
        agent.observe(batch_of(agent, 6, 4))
    x, noise = inputs_for(agent.spec, 32), noise_for(agent, 32)
    state = tree_map(torch.randn_like, agent.initial_state(32))

    def act(start: int, stop: int) -> list[Tensor]:
        rows = tree_map(lambda v: v[start:stop].clone(), (tuple(x), state, noise))
        with torch.inference_mode():
            return tree_leaves(agent.act(Inputs(*rows[0]), rows[1], rows[2]))

    whole = act(0, 32)
    for size in (4, 8, 16):
        for start in range(0, 32, size):
            for part, of_whole in zip(act(start, start + size), whole):
                assert torch.equal(part, of_whole[start : start + size])


def test_a_mask_rules_out_choices_in_acting_and_learning():
    nested = {"a": CHOICE, "b": BOX, "c": CHOICES}  # 4 choices, then 2 and 3
    spec = EnvSpec({"obs": VECTOR, "action_mask": LeafSpec("multi_binary", (9,), "int8")}, nested)
    for net in (NETS["plain"], NETS["lstm"], NETS["normalized"]):
        agent = ActorCritic(spec, net)
        x = inputs_for(spec, 64)
        mask = torch.zeros(64, 9, dtype=torch.int8)
        only = torch.stack([torch.randint(n, (64,)) for n in (4, 2, 3)], -1)
        for offset, column in zip((0, 4, 6), only.T):
            mask[torch.arange(64), offset + column] = 1
        x.obs["action_mask"].copy_(mask)
        chosen, info, _ = agent.act(x, agent.initial_state(64), noise_for(agent, 64))
        assert torch.equal(chosen["a"], only[:, 0] - 1)
        assert torch.equal(chosen["c"], only[:, 1:] + torch.tensor([0, 5]))
        free = {"a": torch.zeros(64), "b": chosen["b"], "c": chosen["c"]}
        if agent.memory is None:
            dist, _ = agent(x)
            assert torch.equal(dist.log_prob(chosen), info["logp"])
            wrong = only[:, 0] != 1  # choice 0 of "a" is value -1, so value 0 is its second
            assert (dist.log_prob(free)[wrong] < -1e8).all()
        else:
            sequence = Inputs(*tree_map(lambda v: v.unsqueeze(0), tuple(x)))
            dist, _ = agent(sequence, agent.initial_state(64))
            torch.testing.assert_close(dist.log_prob(tree_map(lambda v: v.unsqueeze(0), chosen))[0], info["logp"])


def test_the_mask_is_not_fed_to_the_networks():
    spec = EnvSpec({"obs": VECTOR, "action_mask": LeafSpec("box", (2, 2), "float32", 0, 1)}, CHOICE)
    agent = ActorCritic(spec, Net(hidden=(16,), normalize_obs=True))
    assert agent.actor.encoder.size == 3
    batch = batch_of(agent, 3, 4)
    batch.obs["action_mask"][...] = 1
    other = batch.copy()
    other.obs["action_mask"][..., 0, 0] = 0
    assert torch.equal(agent.values(batch), agent.values(other))
    agent.observe(batch)
    assert len(agent.normalizer.moments) == 1  # pyright: ignore
    x = inputs_for(spec, 4)
    x.obs["action_mask"][...] = torch.tensor([[0, 0], [1, 0]])  # a mask of any shape with enough elements
    assert agent.act(x, None, noise_for(agent, 4))[0].tolist() == [1] * 4


def test_contradictions_are_refused_at_construction():
    mask = LeafSpec("multi_binary", (3,), "int8")
    cases = [
        ({"action_mask": mask, "x": VECTOR}, CHOICE, Net(), r"obs\['action_mask'\] has 3 elements for 4 discrete"),
        ({"action_mask": mask, "x": VECTOR}, BOX, Net(), "3 elements for 0 discrete choices"),
        ({"action_mask": LeafSpec("multi_binary", (4,), "int8")}, CHOICE, Net(), "no features"),
        (VECTOR, FREE, Net(squash=True), r"net.squash=True needs finite action bounds; got low=\[-inf, -inf\]"),
        (VECTOR, HALF_FREE, Net(squash=True), "use net.squash=False"),
        (VECTOR, LeafSpec("box", (2,), "float32", 1.0, (2.0, 1.0)), Net(), "expected low < high: leave out"),
        (VECTOR, LeafSpec("box", (2,), "int64", 0.0, 5.0), Net(), "action box of dtype int64"),
        (VECTOR, CHOICE, Net(recurrent="gru", shared=False), "net.shared=False with a recurrent net"),
        (LeafSpec("box", (3, 20, 20), "uint8"), CHOICE, Net(cnn="nature"), "at least 36 x 36; got 20 x 20"),
    ]
    for obs, action, net, message in cases:
        with pytest.raises(ConfigError, match=message):
            ActorCritic(EnvSpec(obs, action), net)


def test_bodies_are_shared_only_where_a_second_one_is_dear():
    choice = EnvSpec(VECTOR, CHOICE)
    assert ActorCritic(choice, Net()).critic is not None
    assert ActorCritic(choice, Net(shared=True)).critic is None
    assert ActorCritic(choice, Net(recurrent="lstm")).critic is None
    assert ActorCritic(EnvSpec({"i": IMAGE, "v": VECTOR}, CHOICE), Net()).critic is None
    assert ActorCritic(EnvSpec(IMAGE, CHOICE), Net(shared=False)).critic is not None


def test_a_separate_critic_does_not_move_the_policy():
    agent = ActorCritic(EnvSpec(VECTOR, CHOICE), Net(hidden=(16,)))
    _, value = agent(inputs_for(agent.spec, 8))
    value.sum().backward()
    moved = {name.split(".")[0] for name, p in agent.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {"critic", "value_head"}


def test_the_first_policy_is_nearly_uniform_and_as_wide_in_any_box():
    agent = ActorCritic(EnvSpec(VECTOR, {"a": CHOICE, "b": BITS, "c": BOX}), Net())
    dist, _ = agent(inputs_for(agent.spec, 64))
    choice, bits, box = dist.parts
    assert (choice.logp.exp() - 0.25).abs().max() < 0.02
    assert bits.logits.abs().max() < 0.05
    assert (box.mode() - torch.tensor([1.0, -1.0])).abs().max() < 0.1  # the middle of the box
    torch.testing.assert_close(box.half * box.log_std.exp(), torch.tensor([4.0, 2.0]))
    narrow = ActorCritic(EnvSpec(VECTOR, BOX), Net(log_std_init=-1.0))
    torch.testing.assert_close(narrow.head.log_std, torch.full((2,), -1.0))


def test_the_deviations_of_several_boxes_are_their_own():
    head = ActionHead(5, {"a": BOX, "b": CHOICE, "c": SCALAR}, squash=False, log_std=0.0)
    with torch.no_grad():
        assert head.log_std is not None
        head.log_std.copy_(torch.tensor([0.1, 0.2, 0.3]))
    a, _, c = head(torch.zeros(4, sum(head.widths))).parts
    assert a.log_std.tolist() == pytest.approx([0.1, 0.2])
    assert c.log_std.tolist() == pytest.approx([0.3])
    assert ActionHead(5, CHOICE, squash=False, log_std=0.0).log_std is None


def test_statistics_are_wanted_until_there_are_some():
    spec = EnvSpec(VECTOR, CHOICE)
    assert not ActorCritic(spec, Net()).needs_statistics
    assert not ActorCritic(EnvSpec(CHOICE, CHOICE), Net(normalize_obs=True)).needs_statistics
    for net in (Net(normalize_obs=True), Net(normalize_reward=True), Net(normalize_obs=True, normalize_reward=True)):
        agent = ActorCritic(spec, net)
        assert agent.needs_statistics
        agent.observe(batch_of(agent, 5, 4))
        assert not agent.needs_statistics


def test_observe_counts_what_was_acted_on_and_the_ends():
    agent = ActorCritic(EnvSpec(VECTOR, CHOICE), Net(normalize_obs=True, normalize_reward=True), discount=0.5)
    batch = batch_of(agent, 5, 4)
    batch.obs[-1] = 1e6  # row T is the next batch's row 0
    batch.valid[2, 1] = False
    agent.observe(batch)
    assert agent.normalizer is not None
    assert agent.reward_scaler is not None
    moments: Any = agent.normalizer.moments[0]
    seen = batch.obs[:-1][batch.valid].double()
    torch.testing.assert_close(moments.mean, seen.mean(0))
    torch.testing.assert_close(moments.var, seen.var(0, correction=0))
    scaler_count = float(agent.reward_scaler.moments.count)
    assert scaler_count == batch.env_steps
    assert agent.reward_scaler.discount == 0.5
    deviation = agent.reward_scaler.moments.var.sqrt().float()
    torch.testing.assert_close(agent.scaled_reward(batch.reward), (batch.reward / deviation).clamp(-10, 10))
    plain = ActorCritic(EnvSpec(VECTOR, CHOICE), Net())
    assert torch.equal(plain.scaled_reward(batch.reward), batch.reward)
    assert not torch.equal(agent.values(batch), agent.values(_with(batch, obs=batch.obs + 1)))


def test_clipped_rewards_are_signs_for_targets_and_one_way_to_change_them_is_chosen():
    agent = ActorCritic(EnvSpec(VECTOR, CHOICE), Net(clip_reward=True))
    reward = torch.tensor([[-21.0, 0.0], [0.25, 400.0]])
    assert agent.scaled_reward(reward).tolist() == [[-1.0, 0.0], [1.0, 1.0]]
    assert reward[0, 0] == -21.0
    assert not agent.needs_statistics
    with pytest.raises(ConfigError, match=r"net\.clip_reward and net\.normalize_reward .* choose one"):
        Net(clip_reward=True, normalize_reward=True)


def test_a_recorded_info_may_stand_for_a_terminal_state_in_targets_alone():
    agent = ActorCritic(EnvSpec(VECTOR, CHOICE), Net(terminal_info="life_lost"))
    batch = batch_of(agent, 4, 2)
    batch.terminated[...] = False
    batch.terminated[3, 1] = True
    lost = torch.full((4, 2), float("nan"))
    lost[1, 0], lost[2, 0] = 1.0, 0.0
    shown = _with(batch, info={**batch.info, "env": {"life_lost": lost}})
    assert agent.terminal(shown).nonzero().tolist() == [[1, 0], [3, 1]]
    assert shown.terminated.sum() == 1
    assert torch.equal(ActorCritic(EnvSpec(VECTOR, CHOICE), Net()).terminal(shown), batch.terminated)
    with pytest.raises(ConfigError, match="--info-keys life_lost"):
        agent.terminal(_with(batch, info={**batch.info, "env": {}}))
    with pytest.raises(ConfigError, match="--info-keys life_lost"):
        agent.terminal(batch)


def _with(batch: SampleBatch, **changes: Any) -> SampleBatch:
    return SampleBatch(**{**vars(batch), **changes})


def test_a_copied_agent_is_another_agent():
    for net in NETS.values():
        agent = ActorCritic(EnvSpec(VECTOR, BOX), net)
        x = inputs_for(agent.spec, 4)
        before = agent.act(x, agent.initial_state(4), None)[0]
        twin = copy.deepcopy(agent)
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(1.0)
        assert torch.equal(agent.act(x, agent.initial_state(4), None)[0], before)
        assert not torch.equal(twin.act(x, twin.initial_state(4), None)[0], before)
        twin.load_state_dict(agent.state_dict())
        assert torch.equal(twin.act(x, twin.initial_state(4), None)[0], before)


@dataclass(frozen=True)
class Settings:
    net: Net = Net(hidden=(8,))
    discount: float = 0.75


def test_the_default_agent_is_made_from_settings():
    spec = EnvSpec(VECTOR, CHOICE)
    agent = actor_critic(spec, Settings(Net(hidden=(8,), normalize_reward=True)))
    assert agent.spec is spec
    assert agent.actor.size == 8
    assert agent.reward_scaler is not None
    assert agent.reward_scaler.discount == 0.75
    assert agent.noise_size == 1


def test_noise_is_one_number_for_each_element_of_the_action():
    sizes = {"choice": 1, "choices": 2, "bits": 4, "box": 2, "scalar": 1, "free": 2, "half free": 2, "nested": 10}
    for name, action in ACTIONS.items():
        agent = ActorCritic(EnvSpec(VECTOR, action), NETS["plain"])
        assert agent.noise_size == sizes[name]
        x, noise = inputs_for(agent.spec, 4), noise_for(agent, 4)
        action_before, info, _ = agent.act(x, None, noise)
        for i, direction in itertools.product(range(agent.noise_size), (0.001, 0.999)):
            other = noise.clone()
            other[:, i] = direction
            changed = agent.act(x, None, other)[1]["logp"]
            assert changed.shape == info["logp"].shape
        flipped = agent.act(x, None, 1 - noise)[0]
        assert any(not torch.equal(a, b) for a, b in zip(tree_leaves(flipped), tree_leaves(action_before)))


def test_allocated_batches_take_what_the_agent_gives():
    """The record's dtypes hold an action without loss."""
    for action in ACTIONS.values():
        agent = ActorCritic(EnvSpec(VECTOR, action), NETS["plain"])
        chosen, info, _ = agent.act(inputs_for(agent.spec, 4), None, noise_for(agent, 4))
        batch = allocate_batch(agent.spec, BatchSpec(1, 4), {"logp": np.float32(0)})
        for out, a in zip(tree_leaves(batch.action), tree_leaves(chosen)):
            torch.from_numpy(out)[0].copy_(a)
            assert torch.equal(torch.from_numpy(out)[0].to(a.dtype), a)
        taken = tree_map(lambda a: torch.from_numpy(a[0]), batch.action)
        dist, _ = agent(inputs_for(agent.spec, 4))
        torch.testing.assert_close(dist.log_prob(taken), info["logp"], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_values_of_many_images_are_computed_in_parts(shared: bool, monkeypatch: pytest.MonkeyPatch):
    agent = ActorCritic(EnvSpec(IMAGE, CHOICE), Net(hidden=(8,), cnn=((4, 8, 4),), shared=shared))
    batch = batch_of(agent, 4, 3)
    whole = agent.values(batch)
    rows: list[int] = []
    body = agent.actor if shared else agent.critic
    assert body is not None
    body.register_forward_pre_hook(lambda layer, args: rows.append(len(args[1])))
    monkeypatch.setattr("penstock.agents.actor_critic._IMAGES", 4)
    parts = agent.values(batch)
    assert rows == [4, 4, 4, 3]
    torch.testing.assert_close(parts, whole)
