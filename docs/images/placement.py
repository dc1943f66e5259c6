"""Draws the picture of README.md: one experiment in six placements, each with the sha256 of the batch that it made.

python docs/images/placement.py

Every digest is computed here: PPO trains on five batches of CartPole-v1, and all that a caller may read of the sixth is
digested. The picture is drawn only if the digests are equal. Needs the extra `ray`.
"""

from __future__ import annotations

import hashlib
import platform
from typing import Any

import torch
from runners import FAINT, HERE, INK, LEARNER, LINE, MONO, PAPER, RUNNER, arrow, box, page, text

import penstock as ps
from penstock.testing.samplers import bits

T, B, SEED, UPDATES = 32, 8, 1, 5
SERIAL, CPU = ps.SerialSampler(T, B), ps.CpuSampler(T, B, workers=2)
RUNNERS = ps.RunnerSampler(runners=2, inner=ps.SerialSampler(T, B // 2), backend="ray", depth=0)
HALVES = ("act, step 0 to 3", "act, step 4 to 7")
PLACEMENTS: list[tuple[str, str, Any, tuple[str, ...], tuple[str, ...]]] = [
    # name, what it is, settings, work in the learner's process, work in others
    ("serial", "one process", SERIAL, ("act, step 0 to 7",), ()),
    ("cpu", "worker processes", CPU, (), HALVES),
    ("gpu", "an action server", ps.GpuSampler(T, B, workers=2), ("act 0 to 7",), ("step 0 to 3", "step 4 to 7")),
    ("alternating", "halves by turns", ps.AlternatingSampler(T, B, workers=2), ("act 0 to 3, 4 to 7",),
     ("step 0, 1; 4, 5", "step 2, 3; 6, 7")),
    ("async-cpu", "depth 0", ps.AsyncCpuSampler(CPU, depth=0), (), HALVES),
    ("runners", "actors of Ray", RUNNERS, (), HALVES),
]  # fmt: skip
ROW, TOP, GRID = 46, 66, 772


def digest(settings: Any) -> str:
    """The sha256, in hexadecimal digits, of the batch after those that PPO was trained on."""
    sampler = settings.build("CartPole-v1", seed=SEED)
    try:
        policy = ps.PPO(epochs=2, minibatch=64).build(sampler.spec, seed=SEED)
        sampler.initialize(policy.agent)
        for itr in range(UPDATES):
            ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
        leaves = bits(sampler.obtain_samples(UPDATES)[0])
    finally:
        sampler.shutdown()
    return hashlib.sha256(b"".join(name.encode() + leaves[name] for name in sorted(leaves))).hexdigest()


def grid(height: float) -> list[str]:
    """The one batch: a column for each slot, time downwards."""
    wide = 11.0
    around = f'x="{GRID}" y="{TOP}" width="{wide * B:g}" height="{height:g}"'
    parts = [f'<rect {around} fill="{RUNNER}"/>']
    parts += [f'<path d="M{GRID + wide * k:g} {TOP} v{height:g}" stroke="{PAPER}"/>' for k in range(1, B)]
    lines = T // 2
    parts += [
        f'<path d="M{GRID} {TOP + height / lines * k:g} h{wide * B:g}" stroke="{PAPER}"/>' for k in range(1, lines)
    ]
    parts.append(f'<rect {around} fill="none" stroke="{LINE}"/>')
    parts.append(text(GRID + wide * B / 2, TOP - 10, f"[T={T}, B={B}]", text_anchor="middle", font_family=MONO))
    return parts


def placement(found: list[str]) -> str:
    """Who acts and who steps in each placement, its digest, and the batch."""
    parts = [
        text(18, 28, "PPO on CartPole-v1, seed 1, environments 0 to 7", font_weight="bold"),
        text(18, 54, "--sampler", font_size=12, font_family=MONO, fill=FAINT),
        text(150, 54, "in the process that learns", font_size=12, fill=FAINT),
        text(322, 54, "in other processes", font_size=12, fill=FAINT),
        text(620, 54, "sha256 of batch 6", font_size=12, fill=FAINT),
    ]
    for k, ((name, what, _, own, others), full) in enumerate(zip(PLACEMENTS, found, strict=True)):
        y = TOP + ROW * k
        parts.append(text(18, y + 15, name, font_weight="bold", font_family=MONO))
        parts.append(text(18, y + 31, what, font_size=12, fill=FAINT))
        for x, works in ((150, own), (322, others)):
            for i, work in enumerate(works):
                at = x + 142 * i
                parts.append(box(at, y, 136, 34, LEARNER if x == 150 else RUNNER))
                parts.append(text(at + 68, y + 22, work, font_size=12, text_anchor="middle"))
        parts.append(text(620, y + 15, full[:16] + "…", font_family=MONO, font_size=13, fill=INK))
        parts.append(arrow(620, y + 24, GRID - 4, y + 24))
    height = ROW * len(found) - 12
    said = (
        f"Computed on {platform.machine()} with torch {torch.__version__} after training on five batches; "
        "other versions may make other bits, the same in all rows."
    )
    parts += [*grid(height), text(18, TOP + height + 26, said, font_size=12, fill=FAINT)]
    return page(880, int(TOP + height + 42), "Six placements of one experiment make the same batch", parts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    computed = [digest(settings) for _, _, settings, _, _ in PLACEMENTS]
    if len(set(computed)) > 1:
        raise SystemExit(f"the batches differ: {dict(zip((x[0] for x in PLACEMENTS), computed))}")
    (HERE / "placement.svg").write_text(placement(computed))
