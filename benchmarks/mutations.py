"""Planted bugs, each alone in a copy of the repository, and whether the tests named for it fail.

    python benchmarks/mutations.py            # all, two at a time: 10 minutes
    python benchmarks/mutations.py --only sac --jobs 1

Writes `results/mutations.md` if all were tried, and exits with 1 if one survived. A bug that came up in earnest and that
no test saw is added here together with its test.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "mutations.md"
LIMIT_S = 900.0
COPIED = ("penstock", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """One bug."""

    what: str
    """Named for people."""
    file: str
    """In the package."""
    old: str
    """Text that stands there once."""
    new: str
    tests: str
    """Arguments of pytest, of which some test must fail; slow ones run as well."""


VIEW, INDEX, REPLAY = "replay/view.py", "replay/index.py", "replay/replay.py"
DQN, SAC, TD3, DDPG, DISCRETE, R2D1 = (
    f"algos/{name}.py" for name in ("dqn", "sac", "td3", "ddpg", "discrete_sac", "r2d1")
)
Q_AGENT, CONTROL, CRITICS, SQUASHED = (
    f"agents/{name}.py" for name in ("q_agent", "continuous", "critics", "distributions")
)
VALUES, DISTRIBUTIONS, TRAIN_OPS = "ops/value_learning.py", "ops/distributional.py", "learn/train_ops.py"
IN_TRANSITIONS, IN_SEQUENCES, IN_FRAMES = (
    f"tests/replay/test_replay.py -k '{x}'"
    for x in ("transitions and prioritized and ring", "sequences and uniform and ring", "uniform and frames")
)
IN_OFF_POLICY, IN_DQN = "tests/algos/test_off_policy_conformance.py", "tests/algos/test_dqn.py"
IN_FAST = "tests/algos/test_fast.py"
IN_SAC, IN_TD3, IN_DDPG, IN_DISCRETE = (
    f"tests/algos/test_sac.py {IN_OFF_POLICY} -k 'sac and not discrete'", f"tests/algos/test_td3.py {IN_OFF_POLICY} -k td3",
    f"{IN_OFF_POLICY} -k ddpg", f"tests/algos/test_discrete_sac.py {IN_OFF_POLICY} -k discrete"
)  # fmt: skip
IN_TRAINING, IN_LEARNING = "tests/algos/test_dqn_training.py", "tests/learn/test_train_on_replay.py"
IN_RATIO = "tests/replay/test_schedule.py"
IN_MANY, IN_REPLAYS, IN_STATES = (
    "tests/learn/test_many_learners.py", "tests/learn/test_replay_learners.py", "tests/run/learners/test_states.py -k 'not async'"
)  # fmt: skip
STATES, IN_CHILD = "samplers/trackers/states.py", "tests/processes/test_child.py"
AHEAD, IN_AHEAD = "samplers/trackers/batch_queue.py", "tests/samplers/test_batch_queue.py"
REDUCTION, SLOT_PARTITION, MINIBATCH, PARTITION = (
    "learn/reduction.py", "learn/slot_partition.py", "learn/rows/minibatch.py", "replay/partition.py"
)  # fmt: skip
IN_R2D1 = "tests/algos/test_r2d1.py tests/algos/test_r2d1_replay.py"

MUTATIONS = (
    # Transitions.
    Mutation("the value after a terminal state counts", VIEW, "self._weights.take(after) * ~terminated",
             "self._weights.take(after)", IN_DQN),
    Mutation("discount^(n-1) in the place of discount^n", VIEW, "self._weights.take(after) * ~terminated",
             "self._weights.take(after - 1) * ~terminated", IN_DQN),
    Mutation("a terminal state among n rows is missed", VIEW, "np.logical_or.reduce(goes_on & terminated, 0)",
             "terminated[0]", IN_TRANSITIONS),
    Mutation("n rewards run on over a row that is not valid", VIEW, "goes_on = storage.valid(at[:-1])",
             "goes_on = np.ones(at[:-1].shape, bool)", IN_TRANSITIONS),
    Mutation("rewards within n steps are not discounted", VIEW, "np.where(goes_on, self._powers[:-1, None] * ",
             "np.where(goes_on, 1.0 * ", IN_SAC),
    Mutation("the next observation is that of one step", VIEW, "storage.places(t + after, b)",
             "storage.places(t + 1, b)", IN_TRANSITIONS),
    Mutation("reset rows are drawn", VIEW, "return storage.valid_rows(t)",
             "return np.ones((len(t), storage.slots), bool)", IN_TRANSITIONS),
    Mutation("a sequence runs on over a gap in the record", VIEW, "storage.valid(at) & ~np.logical_or.accumulate(apart, 0)",
             "storage.valid(at)", IN_SEQUENCES),
    # Index and storage.
    Mutation("columns swapped: slot for unit", INDEX, "at, slot = np.divmod(leaf, self._slots)",
             "slot, at = np.divmod(leaf, self._slots)", IN_TRANSITIONS),
    Mutation("priorities without their power", INDEX, "self._epsilon) ** self._alpha", "self._epsilon)", "tests/replay/test_index.py"),
    Mutation("fresh rows do not get the largest priority", INDEX, "self._largest = max(self._largest, largest)",
             "pass", "tests/replay/test_index.py"),
    Mutation("what overwrote a drawn row gets its priority", INDEX, "kept = (unit >= self.tail) & (unit < self.head)",
             "kept = unit < self.head", IN_LEARNING),
    Mutation("importance weights the wrong way round", REPLAY, "((probability.item(probability.argmin()) / probability) ** beta)",
             "((probability / probability.max()) ** beta)", IN_LEARNING),
    Mutation("beta stays where its schedule begins", REPLAY, "schedule_value(self.settings.priority_beta, progress, self.appended)",
             "schedule_value(self.settings.priority_beta, 0.0)", IN_LEARNING),
    Mutation("frames of the episode before in a stack", "replay/columns.py", "np.minimum(age, self._back) * self._slots",
             "self._back * self._slots", IN_FRAMES),
    Mutation("a right turn in the sum tree keeps its mass", "replay/sum_tree.py", "add(left, right, out)", "add(left, left, out)",
             "tests/replay/test_sum_tree.py"),
    # How often and on what.
    Mutation("the ratio counts rows that are no steps", REPLAY, "added = int(np.count_nonzero(batch.valid))",
             "added = int(batch.valid.size)", IN_RATIO),
    Mutation("the ratio counts the random rows as well", REPLAY, "max(0, self.collected - self.learning_starts) * self.replay_ratio",
             "self.collected * self.replay_ratio", IN_RATIO),
    Mutation("priorities of the wrong rows", TRAIN_OPS, "loss.priorities.cpu().numpy())", "loss.priorities.cpu().numpy()[::-1])",
             IN_LEARNING),
    Mutation("targets with gradient", TRAIN_OPS, "with torch.no_grad():\n            x = policy.postprocess(",
             "with torch.enable_grad():\n            x = policy.postprocess(", IN_LEARNING),
    Mutation("losses do not see importance weights", REPLAY, 'rows["weight"] = drawing.weight', "pass", IN_LEARNING),
    Mutation("noise that is always the same", TRAIN_OPS, "at_address(rng, policy.seed, Purpose.REPLAY, policy.version)",
             "at_address(rng, policy.seed, Purpose.REPLAY, 0)", IN_LEARNING),
    # DQN.
    Mutation("double: the target network chooses", DQN, "chooser = agent(following) if cfg.double else out", "chooser = out", IN_DQN),
    Mutation("the online network bootstraps", DQN, "out = agent.bootstrap(following)", "out = agent(following)", IN_DQN),
    Mutation("DQN without importance weights", DQN, '(each * x["weight"]).mean()', "each.mean()", IN_DQN),
    Mutation("priorities with a sign", VALUES, "(q.detach() - target).abs()", "(q.detach() - target)", IN_DQN),
    Mutation("C51: the value after a terminal state counts", DQN, "reward, discount, agent.atoms)",
             "reward, discount.clamp(min=0.5), agent.atoms)", IN_DQN),
    Mutation("C51: probabilities of the online action unnormalised", DQN, "log_softmax(chosen))\n", "chosen)\n", IN_DQN),
    Mutation("C51: projection off by one", DISTRIBUTIONS, "out[:, 1:].scatter_add_(1, below, above_mass)",
             "out.scatter_add_(1, below, above_mass)", IN_DQN),
    Mutation("quantiles: both axes of the error swapped", DISTRIBUTIONS, "target.unsqueeze(1) - quantiles.unsqueeze(2)",
             "target.unsqueeze(2) - quantiles.unsqueeze(1)", IN_DQN),
    Mutation("quantiles: asymmetry the wrong way round", DISTRIBUTIONS, "(error < 0)", "(error > 0)", IN_DQN),
    Mutation("stale target: never copied", DQN, "updates % cfg.target_interval == 0", "updates % cfg.target_interval == -1", IN_TRAINING),
    Mutation("tau reversed", VALUES, "list(target), list(source), tau\n",
             "list(target), list(source), 1.0 - tau\n", IN_TRAINING),
    Mutation("fresh priorities bootstrap without discount^n", DQN, "* ~terminated * view.discount**after", "* ~terminated", IN_TRAINING),
    Mutation("dueling: the largest advantage is subtracted", VALUES, "advantage.mean(dim, keepdim=True)",
             "advantage.amax(dim, keepdim=True)", "tests/agents/test_q_agent.py"),
    Mutation("targets start from other weights", Q_AGENT, "copy.deepcopy(self.online).requires_grad_(False) if has_target",
             "QNetwork(spec, self.preparation.obs, body, self.actions, outputs, streams, sigma, closing) if has_target", IN_TRAINING),
    Mutation("targets hope for masked actions", Q_AGENT, "return self.legal(inputs, q).argmax(-1)", "return q.argmax(-1)", IN_DQN),
    Mutation("random actions that the mask forbids", Q_AGENT, "mask.cumsum(-1) > nth", "mask.cumsum(-1) >= nth",
             "tests/agents/test_q_agent.py"),
    Mutation("every slot explores like the first", Q_AGENT, "chance[slot.long().remainder(len(chance))]", "chance[0]",
             "tests/agents/test_q_agent.py"),
    Mutation("no random actions before learning starts", Q_AGENT,
             "wanted = [1.0, 1.0] if env_steps < settings.learning_starts else [high, low]", "wanted = [high, low]",
             IN_TRAINING),
    Mutation("a stored policy explores as a new one", Q_AGENT, "self._spread(*self.explored.tolist())", "self._spread(1.0, 1.0)",
             IN_TRAINING),
    Mutation("noise of noisy layers is not squeezed", "agents/noisy.py", "x.sign() * x.abs().sqrt()", "x", "tests/agents/test_noisy.py"),
    Mutation("noisy: the target network gets no noise", Q_AGENT, "(*noisy_layers(self.online), *noisy_layers(self.target))",
             "(*noisy_layers(self.online),)", "tests/agents/test_q_agent.py"),
    # R2D1.
    Mutation("R2D1: values enter targets rescaled", R2D1, "ops.value_unscale(value, cfg.rescale_eps) if cfg.value_rescale else value",
             "value", IN_R2D1),
    Mutation("R2D1: eta the wrong way round", VALUES, "eta * kept.amax(0) + (1.0 - eta)", "(1.0 - eta) * kept.amax(0) + eta", IN_R2D1),
    Mutation("R2D1: the state is not warmed up", R2D1, "warm = between(x.inputs, 0, start)", "warm = between(x.inputs, 0, 1)", IN_R2D1),
    # SAC.
    Mutation("wrong log-determinant of tanh", SQUASHED, "torch.addcmul(2.0 * (u + ", "torch.addcmul(1.0 * (u + ",
             "tests/agents/test_squashed.py"),
    Mutation("gradient of the log-density with the wrong sign", SQUASHED, "action, value=2.0)", "action, value=-2.0)",
             "tests/agents/test_squashed.py"),
    Mutation("log deviations learn beyond their clamp", SQUASHED, "(for_u * noise - for_logp) * inside", "for_u * noise - for_logp",
             "tests/agents/test_squashed.py"),
    Mutation("target without entropy", SAC, ".amin(0) - alpha(agent) * logp", ".amin(0)", IN_SAC),
    Mutation("target of the first critic alone", SAC, "agent.target_q(following, action).amin(0)", "agent.target_q(following, action)[0]",
             IN_SAC),
    Mutation("target of the largest critic", SAC, "agent.target_q(following, action).amin(0)",
             "agent.target_q(following, action).amax(0)", IN_SAC),
    Mutation("temperature with the wrong sign", SAC, "(entropy - target_entropy(agent, cfg))", "(target_entropy(agent, cfg) - entropy)",
             IN_SAC),
    Mutation("wanted entropy with the wrong sign", SAC, "return -float(agent.box.size)", "return float(agent.box.size)", IN_SAC),
    Mutation("the actor seeks small values", SAC, "logp - q(action)", "logp + q(action)", IN_SAC),
    Mutation("critics of actions in the environment's units", SAC, 'agent.box.to_unit(x["action"])', 'x["action"].flatten(1)', IN_SAC),
    Mutation("replay without the discount", SAC, "cfg.n_step, cfg.discount, ", "cfg.n_step, 1.0, ", IN_SAC),
    Mutation("the actor's gradient runs through the other critic", CRITICS, "(which == k).nonzero()", "(which != k).nonzero()",
             "tests/agents/test_critics.py"),
    Mutation("half of the box", CRITICS, "torch.as_tensor((high - low) / 2,", "torch.as_tensor(high - low,",
             "tests/agents/test_critics.py"),
    Mutation("random actions over half of the box", CONTROL, "2.0 * noise[:, -self.box.size :] - 1.0)", "noise[:, -self.box.size :])",
             "tests/agents/test_continuous.py"),
    Mutation("target critics do not start as copies", CONTROL, "copy.deepcopy(self.critics).requires_grad_(False) if has_target",
             "Critics(spec, net, size, critics) if has_target", "tests/agents/test_continuous.py"),
    # TD3, DDPG.
    Mutation("the target actor does not follow", CONTROL, "follow(self.target_actor, self.actor, tau)",
             "follow(self.target_actor, self.target_actor, tau)", IN_DDPG),
    Mutation("TD3: the actor steps at the wrong updates", TD3, "== cfg.policy_delay - 1", "== 0", IN_TD3),
    Mutation("TD3: target noise is not clipped", TD3, ".clamp(-cfg.target_noise_clip, cfg.target_noise_clip)", "", IN_TD3),
    Mutation("TD3: target actions leave the box", TD3, "(agent.target_point(following) + noise).clamp(-1.0, 1.0)",
             "agent.target_point(following) + noise", IN_TD3),
    Mutation("TD3: target of the first critic alone", TD3, "action).amin(0)", "action)[0]", IN_TD3),
    Mutation("FastTD3: the target of the largest mean", "ops/distributional.py", ".sum(-1).argmin(0)", ".sum(-1).argmax(0)", IN_FAST),
    Mutation("FastTD3: the last slot has less than all noise", CONTROL, "/ (self._slots - 1))", "/ self._slots)", IN_FAST),
    Mutation("FastSAC: entropy is not discounted", SAC, '- x["discount"] * (alpha(agent)', "- (alpha(agent)", IN_FAST),
    Mutation("critics from replay see what the actor sees", CONTROL, "self.critics(inputs, self.for_critic(inputs), action)",
             "self.critics(inputs, self.prepared(inputs.obs), action)", "tests/agents/test_keys.py"),
    Mutation("TD3: the actor's step size is ignored", TD3,
             "make_optimizer(agent.actor.parameters(), cfg, cfg.actor_lr)", "make_optimizer(agent.actor.parameters(), cfg, None)", IN_TD3),
    Mutation("DDPG: the online actor chooses in targets", DDPG, "agent.target_point(following)", "agent.point(following)", IN_DDPG),
    Mutation("DDPG without importance weights", DDPG, 'x["target"], x.rows.get("weight"))', 'x["target"])', IN_DDPG),
    # Discrete SAC.
    Mutation("discrete SAC: a sum without chances", DISCRETE, "value = (exp(logp) * (", "value = (1.0 * (", IN_DISCRETE),
    Mutation("discrete SAC: entropy of masked actions wanted", "agents/discrete_control.py",
             "self.actions) if mask is None else mask.sum(-1).to(self.log_alpha.dtype)", "self.actions)", IN_DISCRETE),
    Mutation("discrete SAC: temperature with the wrong sign", DISCRETE, "(entropy - wanted)", "(wanted - entropy)", IN_DISCRETE),
    Mutation("discrete SAC: critics learn from the actor's loss", DISCRETE, "q.detach().amin(0)", "q.amin(0)", IN_DISCRETE),
    # What trains: found in earnest, after every learning curve had looked plausible.
    Mutation("Adam walks through transposed gradients as if they were not", "learn/optimizers.py", "_laid_out_as(p, p.grad) for p",
             "p.grad for p", "tests/learn/test_optimizers.py"),
    Mutation("a worker's replacement begins its episodes anew", "workers/env_worker.py",
             "table = None if message.keep else episode_table[slots]",
             "table = episode_table[slots]", "tests/workers/test_supervisor.py -k slow_to_make"),
    # Many learners.
    Mutation("learners: every share counts alike", REDUCTION, "weighted.mul_(self._rows)", "weighted.mul_(1.0)", IN_MANY),
    Mutation("learners: a share of no rows counts", REDUCTION, "weighted.zero_()", "weighted.mul_(1.0)", IN_REPLAYS),
    Mutation("learners: metrics stay those of the own share", REDUCTION, "_replace(metrics=common, stop", "_replace(stop", IN_MANY),
    Mutation("learners: each takes its stop from its own rows", "learn/policy.py", "(loss := judged(reduction.loss)).stop",
             "(loss := judged(loss)).stop", IN_MANY),
    Mutation("learners: a parameter that no rank trains gets zeros", REDUCTION, "None if g is None else y.view_as(p).to(g.dtype)",
             "y.view_as(p)", IN_MANY),
    Mutation("learners: rows of the wrong slots", MINIBATCH, "row * width + column - own.start", "row * width", IN_MANY),
    Mutation("learners: advantages standardised over the own rows", "learn/rows/postprocess.py", "is None:\n        return ops",
             "is policy.partition:\n        return ops", IN_MANY),
    Mutation("learners: normalisers see the own rows", "learn/policy.py", "if self.partition is not None and watches(self.agent)",
             "if False", IN_MANY),
    Mutation("learners: MARWIL's norm of the own rows", SLOT_PARTITION,
             "return x if partition is None else partition.gather(x)", "return x", IN_MANY),
    Mutation("learners: counts of the own share", "learn/policy.py", "count if self.partition is None else", "count if True else",
             IN_MANY),
    Mutation("norm groups: one norm over all", "learn/step/gradients.py", "group_of.get(id(p), name)", "name",
             "tests/learn/test_gradient.py tests/agents/test_value_scale.py"),
    Mutation("value scale: the head does not follow", "agents/actor_critic.py", "(self.unit / unit).to(parameter.dtype)", "1.0",
             "tests/agents/test_value_scale.py"),
    Mutation("value scale: errors in the unit of rewards", "algos/ppo.py", " / value_unit(agent) ** 2", "",
             "tests/agents/test_value_scale.py"),
    Mutation("scan: what lies beyond an end counts", "ops/returns.py", ".masked_fill_(ends, 0.0)", "", "tests/ops/test_vtrace.py"),
    Mutation("offline: the replay fills as the data is played", "learn/train_ops.py", "    if itr == 0:", "    if False:",
             "tests/algos/test_cql.py"),
    Mutation("learners: each leaves its own gap", PARTITION, "int(self._columns(gap).max())", "gap", IN_REPLAYS),
    Mutation("learners: fresh priorities of the own slots", REPLAY, "None if priority is None else partition.gather_array(priority)",
             "priority", IN_REPLAYS),
    Mutation("learners: a unit in the place of none tells its priority", PARTITION, "whole[at] = priority[: len(at)]",
             "whole[: len(priority)] = priority", IN_REPLAYS),
    Mutation("learners: noise of the first units", PARTITION, "is None else noise[index]", "is None else noise[: len(index)]", IN_REPLAYS),
    Mutation("learners: only own steps are collected", REPLAY, "added = int(partition.sum_array(np.array(added)))", "pass", IN_REPLAYS),
    Mutation("learners: R2D1's loss counts rows that it leaves out", R2D1, ", rows=valid.sum())", ")", IN_REPLAYS),
    Mutation("learners: faults are restored on every rank", "envs/pools/pool.py", "restarts=self.restarts)",
             "restarts=self.restarts, faults=self.faults)", IN_STATES),
    Mutation("learners: every part is that of the first slots", STATES, "journal=journal[at]",
             "journal=journal[: at.stop - at.start]", IN_STATES),
    Mutation("learners: ticks of joined pools are each its own", "envs/pools/pool.py", "n + parts[0].tick - part.tick for",
             "n for", "tests/envs/pools/test_pool.py"),
    Mutation("ahead: one batch less is released", AHEAD, "itr + self.depth + 1)", "itr + max(self.depth, 1))", IN_AHEAD),
    Mutation("ahead: what a lost runner owes is not asked for again", AHEAD, "self.released = self.next\n", "pass\n", IN_AHEAD),
    Mutation("ahead: waiting episodes keep the slots of the whole", AHEAD, ".of_slots(at)", "", "tests/run/learners/test_states.py"),
    Mutation("children: a fork of the parent keeps them alive", "processes/tether.py", "os.close(self._held)", "pass", IN_CHILD),
    Mutation("children: kept output grows", "processes/child.py", "os.ftruncate(self._output, 0)", "pass", IN_CHILD),
    Mutation("children: leavings stay", "processes/termination.py", "    for _ in range(_ROUNDS):", "    for _ in range(0):", IN_CHILD),
)  # fmt: skip


def stale(mutation: Mutation) -> str | None:
    """Why it cannot be planted, or None."""
    found = (ROOT / "penstock" / mutation.file).read_text().count(mutation.old)
    missing = [
        name for name in shlex.split(mutation.tests) if name.startswith("tests/") and not (ROOT / name).is_file()
    ]
    if found != 1:
        return f"{mutation.what}: {mutation.old!r} stands {found} times in {mutation.file}; expected once"
    return f"{mutation.what}: {missing} are gone" if missing else None


def copy_to(folder: Path) -> None:
    """A copy of what the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)


def run_tests(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The tests, on the package in `folder`, up to the first that fails."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "-m", "", *tests]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def try_out(mutation: Mutation) -> tuple[str, float]:
    """The test that failed, or "", and the seconds that it took."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        copy_to(folder)
        file = folder / "penstock" / mutation.file
        file.write_text(file.read_text().replace(mutation.old, mutation.new))
        started = time.monotonic()
        done = run_tests(folder, shlex.split(mutation.tests))
        took = time.monotonic() - started
    failed = [
        line.split(" - ")[0].removeprefix("FAILED ") for line in done.stdout.splitlines() if line.startswith("FAILED ")
    ]
    if done.returncode not in (0, 1) or bool(failed) != (done.returncode == 1):
        raise SystemExit(
            f"{mutation.what}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return (failed[0] if failed else ""), took


def check_unchanged(tests: Sequence[str], jobs: int) -> None:
    """The tests pass without a bug, and are those of the copy."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name, ThreadPoolExecutor(jobs) as pool:
        folder = Path(name)
        copy_to(folder)
        where = [sys.executable, "-c", "import penstock; print(penstock.__file__)"]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        seen = subprocess.run(where, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        if not seen.stdout.startswith(str(folder)):
            raise SystemExit(f"the copy's tests would run {seen.stdout.strip()}; expected {folder}")
        for text, done in zip(tests, pool.map(lambda text: run_tests(folder, shlex.split(text)), tests)):
            if done.returncode:
                raise SystemExit(f"{text} fails without any bug:\n{done.stdout[-3000:]}")


def report(results: list[tuple[Mutation, str, float]]) -> str:
    """The table."""
    killed = sum(bool(test) for _, test, _ in results)
    lines = [
        "# Planted bugs", "",
        "Written by `python benchmarks/mutations.py`: each bug is planted alone in a copy of the repository, and the tests",
        "named beside it run there up to the first that fails.", "",
        f"{killed} of {len(results)} were found. Python {platform.python_version()}, {platform.system()}.", "",
        "| bug | file | found by |", "|---|---|---|",
    ]  # fmt: skip
    for mutation, test, _ in results:
        short = test.removeprefix("tests/").replace("|", "/")
        lines.append(f"| {mutation.what} | `{mutation.file}` | {f'`{short}`' if test else '**nothing**'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Exit code 1 if a bug survived or cannot be planted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="text that the bug's name, file or tests contain")
    parser.add_argument("--jobs", type=int, default=2, help="copies tried at a time")
    parser.add_argument("--skip-unchanged", action="store_true", help="do not run the tests without a bug first")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if args.only.lower() in f"{m.what} {m.file} {m.tests}".lower()]
    problems = [problem for m in chosen if (problem := stale(m))]
    if problems:
        print("\n".join(problems))
        return 1
    if not args.skip_unchanged:
        check_unchanged(sorted({m.tests for m in chosen}), args.jobs)
    results: list[tuple[Mutation, str, float]] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutation, (test, took) in zip(chosen, pool.map(try_out, chosen)):
            results.append((mutation, test, took))
            print(f"{'found   ' if test else 'SURVIVED'} {took:5.1f} s  {mutation.what}: {test}", flush=True)
    if not args.only:
        RESULTS.write_text(report(results))
    return 0 if all(test for _, test, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
