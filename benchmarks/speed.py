"""Speed of penstock beside Stable-Baselines3 and a hand-written loop, on this machine.

Every measurement is a fresh process with one torch thread. The libraries of a case take turns, A B A B, so that
whatever else the machine does falls on both; the table gives medians, and medians of each round's ratio.
Making model and environments counts in `ppo` and `time_to_475`, importing the library does not.

    python benchmarks/speed.py --peer .venv-peer/bin/python
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ENV, T, SECONDS = "CartPole-v1", 128, 2.0
PPO_SETTINGS = {"lr": 1e-3, "entropy_coef": 0.01, "discount": 0.99, "gae_lambda": 0.95, "clip": 0.2, "value_coef": 0.5,
                "max_grad_norm": 0.5, "epochs": 4, "minibatch": 512}  # fmt: skip
PPO_STEPS, SOLVED, MAX_STEPS = 200_000, 475.0, 600_000


@dataclass(frozen=True)
class Bar:
    """A promise: `name`'s median against another's, or against a number."""

    name: str
    than: str | float
    ratio: float
    below: bool = False
    of: str = "value"
    """What of each measurement is compared; "value" is the one in the table."""

    def text(self) -> str:
        than = f"{self.than:,.0f}" if isinstance(self.than, float) else f"{self.ratio} x {self.than}"
        return f"{self.name} {'<=' if self.below else '>='} {than}{'' if self.of == 'value' else f', {self.of}'}"


@dataclass(frozen=True)
class Case:
    """What is measured, by which names, in which unit, and what is promised."""

    title: str
    unit: str
    names: tuple[str, ...]
    bars: tuple[Bar, ...]
    options: tuple[str, ...] = ()
    rounds: int | None = None


CASES = {
    "sampling-16": Case(f"sampling, {ENV}, B=16", "steps/s", ("penstock", "sb3", "floor"),
                        (Bar("penstock", "sb3", 2.1), Bar("penstock", "floor", 0.85)), ("--B", "16")),
    "sampling-64": Case(f"sampling, {ENV}, B=64", "steps/s", ("penstock", "sb3", "floor"),
                        (Bar("penstock", "floor", 0.90),), ("--B", "64")),
    "ppo": Case(f"PPO, {ENV}, {PPO_STEPS // 1000}k steps", "steps/s", ("penstock", "sb3"),
                (Bar("penstock", "sb3", 2.6), Bar("penstock", "sb3", 2.6, of="steps/s without building"))),
    "time_to_475": Case(f"PPO, {ENV}, to a mean return of 475", "s", ("penstock", "sb3"),
                        (Bar("penstock", "sb3", 0.2, below=True),), rounds=5),
    "native": Case("sampling, CartPoleVectorEnv, B=256", "steps/s", ("penstock",), (Bar("penstock", 400_000.0, 1.0),)),
}  # fmt: skip
"""`--only sampling` means both that begin so."""


# ---- one measurement, in a process of its own; imports are here because no interpreter has all the libraries ----


def sampling_penstock(args: argparse.Namespace) -> dict[str, float]:
    """Valid environment steps per second of `obtain_samples` with a fresh policy."""
    import penstock as ps

    return _sampled(ps.SerialSampler(T=T, B=args.B).build(ENV, args.seed), args.seed)


def native_penstock(args: argparse.Namespace) -> dict[str, float]:
    """The same over 256 environments that one numpy program steps at once."""
    import penstock as ps

    return _sampled(ps.SerialSampler(T=64, B=256).build(_cart_poles, args.seed), args.seed)


def _sampled(sampler: Any, seed: int) -> dict[str, float]:
    import penstock as ps

    policy = ps.PPO(**PPO_SETTINGS).build(sampler.spec, seed)
    sampler.initialize(policy.agent)
    itr, steps, started = 0, 0, time.perf_counter()
    while itr < 3 or time.perf_counter() - started < SECONDS:
        if itr == 2:  # two to warm up
            steps, started = 0, time.perf_counter()
        batch, _ = sampler.obtain_samples(itr)
        itr, steps = itr + 1, steps + batch.env_steps
    rate = steps / (time.perf_counter() - started)
    sampler.shutdown()
    return {"value": rate}


def _cart_poles() -> Any:
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    return CartPoleVectorEnv(num_envs=256)


def sampling_sb3(args: argparse.Namespace) -> dict[str, float]:
    """Steps per second of `collect_rollouts` alone."""
    model, callback = _sb3_model(args.seed, args.B)
    batches, started = 0, time.perf_counter()
    while batches < 3 or time.perf_counter() - started < SECONDS:
        if batches == 2:
            started = time.perf_counter()
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=T)
        batches += 1
    return {"value": (batches - 2) * T * args.B / (time.perf_counter() - started)}


def sampling_floor(args: argparse.Namespace) -> dict[str, float]:
    """See floor.py."""
    from floor import floor

    return {"value": floor(ENV, T, args.B, SECONDS, args.seed)}


def ppo_penstock(args: argparse.Namespace) -> dict[str, float]:
    """Environment steps per second of `train`, from its call to its return; and where an iteration's time went."""
    import penstock as ps
    from penstock.run import trainer

    spent = {"sample": 0.0, "train": 0.0}
    step = trainer.training_step

    def counted(*arguments: Any) -> Any:
        result = step(*arguments)
        spent["sample"] += result.sample_s
        spent["train"] += result.train_s
        return result

    trainer.training_step = counted
    exp = ps.Experiment(ENV, ps.PPO(**PPO_SETTINGS), ps.SerialSampler(T=T, B=16), _quiet(args.seed, PPO_STEPS))
    seconds, result = _trained(exp)
    fractions = {f"{name} fraction": s / seconds for name, s in spent.items()}
    return {"value": result.env_steps / seconds, "steps/s without building": result.metrics["time/fps"],
            **fractions, "other fraction": 1.0 - sum(fractions.values())}  # fmt: skip


def ppo_sb3(args: argparse.Namespace) -> dict[str, float]:
    """Environment steps per second of making the model and of `learn`, and of `learn` alone."""
    import stable_baselines3  # noqa: F401

    started = time.perf_counter()
    model, _ = _sb3_model(args.seed, 16)
    built = time.perf_counter()
    model.learn(PPO_STEPS)
    done = time.perf_counter()
    return {
        "value": model.num_timesteps / (done - started),
        "steps/s without building": model.num_timesteps / (done - built),
    }


def time_to_475_penstock(args: argparse.Namespace) -> dict[str, float]:
    """Seconds from the call of `train` with the preset to its return; nothing but the preset's settings."""
    import penstock as ps

    exp = ps.preset("ppo", ENV)
    exp = ps.override(exp, {"run.stop": {"rollout/ep_rew_mean": SOLVED}, "run.steps": MAX_STEPS, "run.seed": args.seed,
                            "run.checkpoint_interval": 0, "run.eval_episodes": 0, "run.progress": "off"})  # fmt: skip
    seconds, result = _trained(exp)
    return {"value": seconds, "steps": float(result.env_steps), "solved": float(result.stopped_by == "stop rule")}


def time_to_475_sb3(args: argparse.Namespace) -> dict[str, float]:
    """Seconds from the call of `learn`, model and environments included, to a mean of 475 over 100 episodes."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Stop(BaseCallback):
        solved = False

        def _on_step(self) -> bool:
            return not self.solved

        def _on_rollout_end(self) -> None:  # once a batch, as penstock looks
            seen = self.model.ep_info_buffer
            self.solved = len(seen) == 100 and sum(e["r"] for e in seen) / 100 >= SOLVED

    stop = Stop()
    started = time.perf_counter()
    model, _ = _sb3_model(args.seed, 16)
    model.learn(MAX_STEPS, callback=stop)
    seconds = time.perf_counter() - started
    return {"value": seconds, "steps": float(model.num_timesteps), "solved": float(stop.solved)}


def _quiet(seed: int, steps: int) -> Any:
    import penstock as ps

    return ps.RunConfig(steps=steps, seed=seed, checkpoint_interval=0, eval_episodes=0, progress="off")


def _trained(exp: Any) -> tuple[float, Any]:
    import penstock as ps

    with tempfile.TemporaryDirectory() as folder:
        exp = ps.override(exp, {"run.dir": f"{folder}/run"})
        train = ps.train  # its modules are imported here, as the peer's are before its clock starts
        started = time.perf_counter()
        result = train(exp)
        return time.perf_counter() - started, result


def _sb3_model(seed: int, B: int) -> tuple[Any, Any]:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    s = PPO_SETTINGS
    model = PPO("MlpPolicy", make_vec_env(ENV, n_envs=B, seed=seed), n_steps=T, batch_size=int(s["minibatch"]),
                n_epochs=int(s["epochs"]), learning_rate=s["lr"], ent_coef=s["entropy_coef"], gamma=s["discount"],
                gae_lambda=s["gae_lambda"], clip_range=s["clip"], vf_coef=s["value_coef"],
                max_grad_norm=s["max_grad_norm"], seed=seed, device="cpu", verbose=0)  # fmt: skip
    _, callback = model._setup_learn(1 << 40)
    return model, callback


# ---- the parent ----


def measure(case: str, name: str, seed: int, options: tuple[str, ...], python: str) -> dict[str, float]:
    """Runs one measurement in a fresh process. Raises RuntimeError with what it printed if it fails."""
    command = [python, __file__, "--child", f"{case}_{name}", "--seed", str(seed), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def child(name: str, args: argparse.Namespace) -> None:
    """Measures and prints one line of JSON."""
    import torch

    torch.set_num_threads(1)
    wall, cpu = time.perf_counter(), time.process_time()
    found = globals()[name](args)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    print(json.dumps({**found, "of a core": share}))


def run_case(key: str, peer: str | None, rounds: int) -> dict[str, list[dict[str, float]]]:
    """All measurements of a case by library, round by round; every round has a seed of its own."""
    case, base = CASES[key], key.split("-")[0]
    names = [name for name in case.names if name != "sb3" or peer]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for i in range(case.rounds or rounds):
        for name in names if i % 2 == 0 else names[::-1]:
            python = peer if name == "sb3" and peer else sys.executable
            found[name].append(measure(base, name, i + 1, case.options, python))
            print(f"{key} round {i + 1}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found


def verdicts(case: Case, found: dict[str, list[dict[str, float]]]) -> list[tuple[str, float, float, str]]:
    """For each bar its text, what it is about by the wall clock and by CPU time, and met, missed or unclear."""
    out: list[tuple[str, float, float, str]] = []
    for bar in case.bars:
        mine = found[bar.name]
        if isinstance(bar.than, float):
            measured = [
                statistics.median(_value(row, by_cpu, case.unit, bar.of) for row in mine) / bar.than
                for by_cpu in (False, True)
            ]
        elif bar.than not in found:
            continue
        else:
            measured = [_ratio(mine, found[bar.than], by_cpu, case.unit, bar.of) for by_cpu in (False, True)]
        met = [ratio <= bar.ratio if bar.below else ratio >= bar.ratio for ratio in measured]
        if not all(row.get("solved", 1.0) for row in mine):
            met = [False]
        verdict = "met" if all(met) else "**unclear**: the machine was busy" if any(met) else "**missed**"
        out.append((bar.text(), measured[0], measured[1], verdict))
    return out


def report(results: dict[str, dict[str, list[dict[str, float]]]], about: dict[str, str]) -> str:
    """The tables as Markdown."""
    lines = ["# Speed", "", *(f"- {name}: {value}" for name, value in about.items()), "",
             "| case | what | unit | median | lowest | highest | n | of a core | penstock / it | by CPU time |",
             "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    notes: list[str] = []
    for key, found in results.items():
        case = CASES[key]
        for name, rows in found.items():
            values = [row["value"] for row in rows]
            shown = [_shown(x) for x in (statistics.median(values), min(values), max(values))]
            share = statistics.median(row["of a core"] for row in rows)
            ratios = (_shown(_ratio(found["penstock"], rows, by_cpu, case.unit)) for by_cpu in (False, True))
            last = " | " if name == "penstock" else " | ".join(ratios)
            lines.append(
                f"| {case.title} | {name} | {case.unit} | {' | '.join(shown)} | {len(values)} | {share:.2f} | {last} |"
            )
            for extra in [k for k in rows[0] if k not in ("value", "of a core")]:
                middle = statistics.median(row[extra] for row in rows)
                text = f"{sum(row[extra] for row in rows):.0f} of {len(rows)}" if extra == "solved" else _shown(middle)
                notes.append(f"- {case.title}, {name}: {extra} {text}")
    lines += ["", "| bar | measured | by CPU time | |", "|---|---|---|---|"]
    for key, found in results.items():
        for text, wall, cpu, verdict in verdicts(CASES[key], found):
            lines.append(f"| {CASES[key].title}: {text} | {wall:.2f} | {cpu:.2f} | {verdict} |")
    return "\n".join([*lines, "", *notes, ""])


Rows = list[dict[str, float]]


def _ratio(mine: Rows, others: Rows, by_cpu: bool, unit: str, of: str = "value") -> float:
    """The median over rounds of one's value over the other's."""
    return statistics.median(_value(a, by_cpu, unit, of) / _value(b, by_cpu, unit, of) for a, b in zip(mine, others))


def _value(row: dict[str, float], by_cpu: bool, unit: str, of: str = "value") -> float:
    """By the wall clock, or by CPU time, which waiting for a core is no part of."""
    share = row["of a core"] if by_cpu else 1.0
    return row[of] * share if unit == "s" else row[of] / share


def _shown(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.2f}"


def about(peer: str | None, command: list[str]) -> dict[str, str]:
    """Command, date, machine and versions."""
    shown = [".venv-peer/bin/python" if word == peer else word for word in command]
    out = {"command": "python benchmarks/" + " ".join(shown), "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
           "machine": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores, one torch thread",
           "load": f"{os.getloadavg()[0]:.1f} runnable processes a minute before the start",
           "python": platform.python_version()}  # fmt: skip
    for package in ("penstock", "torch", "numpy", "gymnasium"):
        out[package] = importlib.metadata.version(package)
    if peer:
        code = "import importlib.metadata as m; print(', '.join(n + ' ' + m.version(n) for n in " \
               "('stable-baselines3', 'torch', 'numpy', 'gymnasium')))"  # fmt: skip
        out["peer"] = subprocess.run(
            [peer, "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
    return out


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return f"{found.get('model name', platform.machine())} (family {found.get('cpu family', '?')})"


def main(argv: list[str]) -> int:
    """Runs the cases asked for and writes results/speed.md and speed.json. 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer", help="python of an environment with stable-baselines3; without it penstock runs alone"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each library (5; time_to_475 always 5)")
    parser.add_argument("--only", default="", help="cases by comma: sampling,ppo,time_to_475,native")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--B", type=int, default=16, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(args.child, args)
        return 0
    wanted = [part for part in args.only.split(",") if part]
    keys = [key for key in CASES if not wanted or key.split("-")[0] in wanted or key in wanted]
    if not keys or args.rounds < 1:
        parser.error(
            f"--only {args.only!r} --rounds {args.rounds}: expected some of {', '.join(CASES)}, and 1 round or more"
        )
    header = about(args.peer, [Path(__file__).name, *argv])
    results = {key: run_case(key, args.peer, args.rounds) for key in keys}
    text = report(results, header)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "speed.md").write_text(text)
    (RESULTS / "speed.json").write_text(json.dumps({"about": header, "results": results}, indent=1) + "\n")
    return 0 if all(v[-1] == "met" for key in keys for v in verdicts(CASES[key], results[key])) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
