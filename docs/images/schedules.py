"""Draws schedules.png: each kind of schedule over a run. `python docs/images/schedules.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from penstock.core.schedule import schedule_value

TEXTS = (
    "linear(1, 0)",
    "linear(1, 0.05, 0.3)",
    "cosine(1, 0)",
    "exponential(1, 0.01)",
    "piecewise((0, 1), (0.3, 1), (0.5, 0.4), (0.75, 0.4), (0.75, 0.1))",
    "warmup(0.1, cosine(1, 0))",
)


def main() -> None:
    figure, axes = plt.subplots(2, 3, figsize=(9, 3.6), sharex=True, sharey=True)
    at = [i / 500 for i in range(501)]
    for text, axis in zip(TEXTS, axes.flat):
        axis.plot(at, [schedule_value(text, x) for x in at], color="#0072b2", linewidth=1.8)
        axis.set_title(text if len(text) < 40 else "piecewise((0, 1), (0.3, 1), ...)", fontsize=8.5, family="monospace")
        axis.grid(alpha=0.3)
        axis.set_yticks([0, 0.5, 1])
    for axis in axes[1]:
        axis.set_xlabel("fraction of the run")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("schedules.png"), dpi=110)


if __name__ == "__main__":
    main()
