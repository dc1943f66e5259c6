"""The files of a shared policy: weights with their contract, learning curve, video, and the model card."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core import VERSION
from penstock.core.errors import ConfigError, MissingExtraError, printable
from penstock.core.spec import describe
from penstock.learn.export.files import contract_path
from penstock.learn.policy_set import AnyPolicy, PolicySet, by_id
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.files.rundir import META
from penstock.run.files.stored_experiment import read_json
from penstock.run.log import EVALUATIONS, read_rows
from penstock.run.plots.figure import plot_runs
from penstock.run.plots.run_table import read_run

CARD, POLICY = "README.md", "policy.safetensors"
CONTRACT = contract_path(Path(POLICY)).name
_NOT_SHOWN = ("--run.dir", "--init")
"""Options with paths of the machine that trained."""


def write_bundle(policy: AnyPolicy, run_dir: Path, which: str, folder: Path, repo: str) -> None:
    """Writes the files to push into an empty folder.

    Raises:
        ConfigError: the policy cannot be saved so that `ps.load` opens it. MissingExtraError: huggingface_hub is not
            installed.
    """
    several = isinstance(policy, PolicySet)
    if several:
        policy.save(folder / POLICY)
    else:
        policy.export(folder / POLICY)  # compared with `predict`, and its contract beside it
    try:
        plot_runs([run_dir], folder / "curve.png")
    except (ConfigError, MissingExtraError):  # no row yet, or no matplotlib
        (folder / "curve.png").unlink(missing_ok=True)
    if videos := sorted((run_dir / "videos").glob("[0-9]*.mp4")):
        shutil.copyfile(videos[-1], folder / "replay.mp4")  # a run with links that lead out of it was not opened
    step = int(find_checkpoint(run_dir, which).name)
    contract = {} if several else json.loads((folder / CONTRACT).read_bytes())
    text = _card(policy, run_dir, step, repo, sorted(os.listdir(folder)), contract)
    (folder / CARD).write_text(text, encoding="utf-8")


def _card(
    policy: AnyPolicy, run_dir: Path, step: int, repo: str, files: Sequence[str], contract: Mapping[str, Any]
) -> str:
    meta, run = read_json(run_dir / META), read_run(run_dir)
    env, algo = str(meta.get("env", "")), str(meta.get("algo", ""))
    played = [row for row in read_rows(run_dir / EVALUATIONS) if row["step"] <= step and "eval/mean_reward" in row]
    rows = {"environment": _code(env), "algorithm": _code(algo), "seed": _code(meta.get("seed"))}
    rows["checkpoint"] = f"step {step:,}"
    result = None
    if played:
        last = played[-1]
        result = f"{last['eval/mean_reward']:.2f} +/- {last.get('eval/std_reward', 0.0):.2f}"
        rows["return, evaluation"] = f"{result} over {len(last.get('returns', ()))} episodes, at step {last['step']:,}"
    rows["return, last training episodes"] = f"{run.return_:,.2f}"
    rows["trained for"] = f"{run.steps:,} steps, {60 * run.hours:,.1f} minutes"
    rows["versions"] = _code(", ".join(f"{name} {text}" for name, text in dict(meta.get("versions") or {}).items()))
    table = "".join(f"| {name} | {text} |\n" for name, text in rows.items() if "nan" not in text)
    parts = [f"---\n{_data(env, algo, result)}\n---\n# {algo} on {_code(env)}\n", f"| | |\n|---|---|\n{table}"]
    if "curve.png" in files:
        parts.append("![Learning curve](curve.png)\n")
    if "replay.mp4" in files:
        parts.append('<video controls muted loop src="replay.mp4"></video>\n')
    parts.append(
        f'## Use\n\n```sh\npip install "penstock[hub]"\npenstock enjoy hf:{repo} --env {shlex.quote(env)}\n```\n\n'
        f'```python\nimport penstock as ps\n\npolicy = ps.load("hf:{repo}")\n```\n\n{_said_of_code(policy)}'
    )
    if command := _command(meta.get("command")):
        fence = "`" * (3 if "```" not in command else 12)
        parts.append(f"## Training\n\n{fence}sh\n{command}\n{fence}\n")
    parts.append(f"## Inputs and outputs\n\n{_ports(policy, contract)}")
    return "\n".join(parts)


def _data(env: str, algo: str, result: str | None) -> str:
    """The header that the Hub reads: tags and the result, as YAML."""
    try:
        from huggingface_hub import EvalResult, ModelCardData  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "hub") from error
    task, found = "reinforcement-learning", None
    if result is not None:
        found = [
            EvalResult(
                task_type=task, dataset_type=env, dataset_name=env, metric_type="mean_reward", metric_value=result
            )
        ]
    tags = [task, "penstock", algo, env]
    return ModelCardData(library_name="penstock", tags=tags, model_name=algo, eval_results=found).to_yaml()


def _said_of_code(policy: AnyPolicy) -> str:
    modules = {type(own.algorithm).__module__ for own in by_id(policy).values()}
    foreign = sorted(module for module in modules if module.partition(".")[0] != "penstock")
    if not foreign:
        return "Settings and weights are data: nothing of this repository is executed.\n"
    return f"It names code that is not here, {_code(', '.join(foreign))}: where you have that, `trust=True`.\n"


def _command(argv: Any) -> str:
    """The command that trained, without paths of that machine; "" where it is not known."""
    if not isinstance(argv, list) or not argv:
        return ""
    first, *rest = map(str, argv)
    while any(found := [i for i, word in enumerate(rest) if word.partition("=")[0] in _NOT_SHOWN]):
        del rest[found[0] : found[0] + (1 if "=" in rest[found[0]] else 2)]
    name = Path(first).name
    names = ["penstock"] if name in ("penstock", "__main__.py") else ["python", name]
    return printable(shlex.join([*names, *rest]))


def _ports(policy: AnyPolicy, contract: Mapping[str, Any]) -> str:
    if not contract:
        lines = [
            f"| {_code(name)} | {_code(describe(own.spec.obs))} | {_code(describe(own.spec.action))} |"
            for name, own in by_id(policy).items()
        ]
        return "| policy | observation | action |\n|---|---|---|\n" + "\n".join(lines) + "\n"
    lines = [
        f"| {kind} | {_code(port['name'])} | {_code(port['dtype'])} | {_code(port['shape'])} |"
        for kind in ("inputs", "outputs")
        for port in contract[kind]
    ]
    head = f"Spaces, memory and normaliser: `{CONTRACT}`, written by penstock {VERSION}.\n\n"
    return f"{head}| | name | dtype | shape |\n|---|---|---|---|\n" + "\n".join(lines) + "\n"


def _code(value: Any) -> str:
    """A value as code in a cell of a table, whatever is in it."""
    text = printable(str(value), kept="").replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else ""
