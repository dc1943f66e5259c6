"""Acting on one observation: `predict`, the module in torch, and the exported file in onnxruntime, each on one thread.

They act by turns; the table has the median of each, and what onnxruntime takes of the others. Needs the extra `export`.

    python benchmarks/export.py [--rounds 300] [--write]
"""

from __future__ import annotations

import argparse
import statistics
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


def medians(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Median time of each call in microseconds; they take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for k in range(rounds + 20):
        for call, taken in zip(calls, times):
            start = time.perf_counter()
            call()
            if k >= 20:
                taken.append(1e6 * (time.perf_counter() - start))
    return [*map(statistics.median, times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| policy, one observation | predict, µs | torch module, µs | onnxruntime, µs | of predict | of the module |",
        "|---|---|---|---|---|---|",
    ]
    for name, (spec, settings) in CASES.items():
        by_predict, by_module, by_file = medians(actors(spec, settings), args.rounds)
        ratios = f"{by_file / by_predict:.2f} | {by_file / by_module:.2f}"
        lines.append(f"| {name} | {by_predict:,.0f} | {by_module:,.0f} | {by_file:,.0f} | {ratios} |")
        print(lines[-1], flush=True)
    if args.write:
        RESULT.write_text(
            f"# Exported policies\n\n`python benchmarks/export.py --write`, one thread each, by turns.\n\n{chr(10).join(lines)}\n"
        )


if __name__ == "__main__":
    main()
