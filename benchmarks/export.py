"""Acting on one observation: `predict`, the module in torch, and the exported file in onnxruntime, each on one thread.

They take turns of 20 calls. The table has the median of each, and what onnxruntime takes of the others, by medians and by
the quickest tenth, which other processes disturb less. Needs the extra `export`.

    python benchmarks/export.py [--turns 20] [--write]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as ps
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.learn.export.graph import ActingGraph

VECTOR = LeafSpec("box", (8,), "float32", -2.0, 2.0)
IMAGE = LeafSpec("box", (84, 84, 4), "uint8", 0.0, 255.0)
CHOICE = LeafSpec("discrete", (), "int64", sizes=(5,))
BOX = LeafSpec("box", (3,), "float32", -1.0, 1.0)
CASES: dict[str, tuple[EnvSpec, Any]] = {
    "PPO, 2 x 64": (EnvSpec(VECTOR, CHOICE), ps.PPO()),
    "SAC, 2 x 256, normalised": (EnvSpec(VECTOR, BOX), ps.SAC(net=ps.Net(hidden=(256, 256), normalize_obs=True))),
    "PPO, LSTM": (EnvSpec(VECTOR, CHOICE), ps.PPO(net=ps.Net(recurrent="lstm"))),
    "DQN, Nature CNN": (EnvSpec(IMAGE, CHOICE), ps.DQN()),
    "PPO, IMPALA CNN": (EnvSpec(IMAGE, CHOICE), ps.PPO(net=ps.Net(cnn="impala"))),
}
TURN = 20
RESULT = Path(__file__).parent / "results" / "export.md"


def actors(spec: EnvSpec, settings: Any) -> list[Callable[[], Any]]:
    """`predict`, the torch module and the exported file, each for one observation of a policy."""
    import onnxruntime

    policy = settings.build(spec, seed=1)
    one = np.ones((1, *spec.obs.shape), spec.obs.dtype)
    graph = ActingGraph(policy.agent, spec, spec.obs)
    state = [np.zeros((1, *port.shape), port.dtype) for port in graph.state]
    inputs = [one, *state, *([np.ones(1, bool)] if state else [])]
    with tempfile.TemporaryDirectory() as folder:
        data = policy.export(Path(folder) / "policy.onnx").read_bytes()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    feed = dict(zip([port.name for port in graph.inputs], inputs))
    tensors = [*map(torch.from_numpy, inputs)]

    def module() -> None:
        with torch.inference_mode():
            graph(*tensors)

    return [lambda: policy.predict(one[0]), module, lambda: session.run(None, feed)]


def times(calls: list[Callable[[], Any]], turns: int) -> np.ndarray[Any, Any]:
    """[calls, turns * 20] microseconds."""
    taken = np.zeros((len(calls), turns + 1, TURN))
    for turn in range(turns + 1):
        for i, call in enumerate(calls):
            for k in range(TURN):
                start = time.perf_counter()
                call()
                taken[i, turn, k] = 1e6 * (time.perf_counter() - start)
    return taken[:, 1:].reshape(len(calls), -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    lines = [
        "| policy, one observation | predict, µs | torch module, µs | onnxruntime, µs | of predict | of the module |",
        "|---|---|---|---|---|---|",
    ]
    for name, (spec, settings) in CASES.items():
        taken = times(actors(spec, settings), args.turns)
        shown = " | ".join(f"{x:,.0f}" for x in np.median(taken, 1))
        middle, quick = np.quantile(taken, 0.5, 1), np.quantile(taken, 0.1, 1)
        ratios = " | ".join(f"{middle[2] / middle[i]:.2f}, {quick[2] / quick[i]:.2f}" for i in (0, 1))
        lines.append(f"| {name} | {shown} | {ratios} |")
        print(lines[-1], flush=True)
    if args.write:
        here = f"{os.cpu_count()} cores, one thread each, {load:.1f} runnable processes a minute before the start"
        command = f"`python benchmarks/export.py --turns {args.turns} --write`"
        RESULT.write_text(
            "\n".join(
                ["# Exported policies", "", f"- {command}", f"- {here}; torch {torch.__version__}", "", *lines, ""]
            )
        )


if __name__ == "__main__":
    main()
