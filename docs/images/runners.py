"""Draws the pictures of docs/cluster.md: who holds what, and who works when, by the rules of a RunnerSampler.

python docs/images/runners.py
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
INK, FAINT, LINE, PAPER = "#1f2933", "#627d98", "#334e68", "#ffffff"
RUNNER, LEARNER = "#d9e8f5", "#f4e6c3"
SANS, MONO = "Helvetica, Arial, DejaVu Sans, sans-serif", "Menlo, Consolas, DejaVu Sans Mono, monospace"
UNIT, LANE, LEFT = 25, 46, 96
DRIVER, RUNNERS = 1, (0, 2)


class Work(NamedTuple):
    """A box of a timeline: lane 1 is the driver, between the runners."""

    lane: int
    begins: float
    ends: float
    text: str
    below: str


class Handover(NamedTuple):
    """A fragment that the driver takes from a runner's lane, or requests that it sends there."""

    lane: int
    at: float
    taken: bool


def rounds(
    depth: int, sampling: tuple[float, float], learning: float, batches: int
) -> tuple[list[Work], list[Handover]]:
    """Batch k is requested when training on batch k - 1 - depth is finished, with the weights of then."""
    works, lines = [], []
    free, now, sent, done = [0.0, 0.0], 0.0, 0, dict[int, float]()
    for k in range(batches + 1):
        for itr in range(sent, k + depth + 1):
            for i, takes in enumerate(sampling):
                begins = max(free[i], now)
                free[i] = begins + takes
                works.append(Work(RUNNERS[i], begins, free[i], f"batch {itr}", f"v{max(itr - depth, 0)}"))
                done[itr] = max(done.get(itr, 0.0), free[i])
        lines += [Handover(lane, now, False) for lane in RUNNERS]
        sent = k + depth + 1
        begins = max(now, done[k])
        lines += [Handover(lane, begins, True) for lane in RUNNERS]
        now = begins + learning
        works.append(Work(DRIVER, begins, now, f"learn {k}", f"to v{k + 1}"))
    return works, lines


def ready(
    requests: int, sampling: tuple[float, float], learning: float, batches: int
) -> tuple[list[Work], list[Handover]]:
    """A batch is the fragment that is ready, its runner asked again at once, with the newest weights."""
    works, lines = [], []
    free, now, queues = [0.0, 0.0], 0.0, list[list[tuple[float, str]]]([[], []])
    numbers, served = [0, 0], [0, 0]

    def ask(itr: int) -> None:
        for i, takes in enumerate(sampling):
            while len(queues[i]) < requests:
                begins = max(free[i], now)
                free[i], name = begins + takes, f"{'ab'[i]}{numbers[i]}"
                works.append(Work(RUNNERS[i], begins, free[i], name, f"v{itr}"))
                queues[i].append((free[i], name))
                numbers[i] += 1
                lines.append(Handover(RUNNERS[i], now, False))

    for k in range(batches):
        ask(k)
        now = max(now, min(queue[0][0] for queue in queues))
        i = min((i for i in (0, 1) if queues[i][0][0] <= now), key=lambda i: served[i])
        name, served[i] = queues[i].pop(0)[1], k + 1
        lines.append(Handover(RUNNERS[i], now, True))
        ask(k)
        works.append(Work(DRIVER, now, now + learning, f"learn {name}", f"to v{k + 1}"))
        now += learning
    return works, lines


def text(x: float, y: float, said: str, **style: object) -> str:
    marks = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:g}" y="{y:g}"{marks}>{said}</text>'


def box(x: float, y: float, w: float, h: float, fill: str, stroke: str = LINE, **style: object) -> str:
    marks = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    size = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"'
    return f'<rect {size} rx="5" fill="{fill}" stroke="{stroke}"{marks}/>'


def arrow(x0: float, y0: float, x1: float, y1: float, color: str = LINE) -> str:
    tip = "tip" if color == LINE else "faint"
    return f'<path d="M{x0:g} {y0:g} L{x1:g} {y1:g}" stroke="{color}" fill="none" marker-end="url(#{tip})"/>'


def page(width: int, height: int, label: str, parts: list[str]) -> str:
    tips = "".join(
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0 L10 5 L0 10 z" fill="{color}"/></marker>'
        for name, color in (("tip", LINE), ("faint", FAINT))
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{label}" font-family="{SANS}" font-size="13" fill="{INK}">'
    )
    frame = f'<rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10" fill="{PAPER}" stroke="#9fb3c8"/>'
    return "\n".join([head, f"<defs>{tips}</defs>", frame, *parts, "</svg>\n"])


def timeline(y: float, title: str, why: str, drawn: tuple[list[Work], list[Handover]], end: float) -> list[str]:
    """Three lanes from time 0 to `end`, with what was cut at the end left out."""
    works, lines = drawn
    parts = [text(18, y, title, font_weight="bold"), text(18, y + 18, why, fill=FAINT, font_size=12)]
    top = y + 30
    for lane, name in enumerate(("runner a", "driver", "runner b")):
        parts.append(text(18, top + lane * LANE + 21, name))
        at = top + lane * LANE + 32
        parts.append(f'<path d="M{LEFT} {at:g} H{LEFT + end * UNIT:g}" stroke="#d9e2ec"/>')
    for work in works:
        if work.begins >= end - 0.5:
            continue
        x, wide = LEFT + work.begins * UNIT, (min(work.ends, end) - work.begins) * UNIT
        at, fill = top + work.lane * LANE, LEARNER if work.lane == DRIVER else RUNNER
        parts.append(box(x + 1, at, wide - 2, 32, fill))
        if work.ends <= end:
            said = {"text_anchor": "middle", "font_size": 11}
            parts.append(text(x + wide / 2, at + 14, work.text, **said))
            parts.append(text(x + wide / 2, at + 27, work.below, **said, fill=FAINT, font_family=MONO))
    for line in sorted(set(lines)):
        if line.at < end - 0.5:
            near, far = (top + 32, top + LANE) if line.lane < DRIVER else (top + 2 * LANE, top + LANE + 32)
            x = LEFT + line.at * UNIT + (-4 if line.taken else 4)
            parts.append(arrow(x, near, x, far) if line.taken else arrow(x, far, x, near, FAINT))
    return parts


def flow() -> str:
    """Who holds what."""
    dashed = {"stroke_dasharray": "5 4"}
    parts = [
        box(18, 40, 330, 306, "#f8f5ee", "#d9cdb0", **dashed),
        text(32, 30, "driver: the process that you start", font_weight="bold"),
        box(500, 40, 362, 146, "#f3f7fb", "#bcccdc", **dashed),
        text(514, 30, "runner 0: a process or actor, on any machine", font_weight="bold"),
        box(500, 216, 362, 130, "#f3f7fb", "#bcccdc", **dashed),
        text(514, 207, "runner 1", font_weight="bold"),
    ]
    held = (
        (36, 56, "learner: the policy", "agent, optimizers, version; replay"),
        (36, 218, "the run", "statistics, journal, metrics, checkpoints"),
        (36, 284, "Runners", "deadlines, faults, replacements"),
    )
    for x, y, name, what in held:
        parts += [box(x, y, 294, 50, LEARNER), text(x + 147, y + 21, name, font_weight="bold", text_anchor="middle")]
        parts.append(text(x + 147, y + 39, what, text_anchor="middle", font_size=12))
    parts += [box(36, 122, 294, 80, PAPER), box(42, 128, 139, 28, RUNNER), box(185, 128, 139, 28, RUNNER)]
    parts += [
        text(111, 147, "slots 0 to 7", text_anchor="middle"),
        text(255, 147, "slots 8 to 15", text_anchor="middle"),
        text(183, 176, "one SampleBatch [T, B]", text_anchor="middle", font_weight="bold"),
        text(183, 193, "row 0 is row T of the one before", text_anchor="middle", font_size=12),
    ]
    for y, high in ((56, 114), (232, 98)):
        parts += [
            box(516, y, 158, high, PAPER),
            text(595, y + 24, "inner sampler", text_anchor="middle", font_weight="bold"),
            text(595, y + 44, "serial, cpu, gpu,", text_anchor="middle", font_size=12),
            text(595, y + 60, "alternating", text_anchor="middle", font_size=12),
            text(595, y + 82, "a copy of the agent", text_anchor="middle", font_size=12),
            box(706, y, 140, high, RUNNER),
            text(776, y + 24, "environments", text_anchor="middle", font_weight="bold"),
            text(776, y + 44, "of its slots, here or in", text_anchor="middle", font_size=12),
            text(776, y + 60, "worker processes", text_anchor="middle", font_size=12),
            arrow(676, y + 30, 704, y + 30),
            arrow(704, y + 48, 676, y + 48),
        ]
    parts += [arrow(348, 84, 498, 84, FAINT), arrow(498, 150, 348, 150)]
    parts += [arrow(348, 244, 498, 244, FAINT), arrow(498, 310, 348, 310)]
    for y in (84, 244):
        parts += [
            text(424, y - 24, "fill(itr, version,", text_anchor="middle", font_size=11, font_family=MONO),
            text(424, y - 9, "weights)", text_anchor="middle", font_size=11, font_family=MONO),
            text(424, y + 58, "a fragment:", text_anchor="middle", font_size=12),
            text(424, y + 82, "T rows of 8 slots", text_anchor="middle", font_size=12),
        ]
    parts.append(text(440, 372, "One message a fragment each way. Large weights are put once and copied once to each machine.",
                      text_anchor="middle", font_size=12, fill=FAINT))  # fmt: skip
    return page(880, 388, "What lives at the driver and what at the runners", parts)


def times() -> str:
    """Who works when."""
    end = 30.4
    shown = (
        ("rounds, depth=0", "The synchronous sampler: all wait for the slowest runner, then for the learner.",
         rounds(0, (3, 3.8), 3, 5)),
        ("rounds, depth=1", "Batch k acts with version k - 1, whatever the timing: each request carries its weights.",
         rounds(1, (3, 3.8), 3, 8)),
        ("ready, two requests a runner", "A batch is one fragment, of the runner that is ready and was served longest ago; "
         "another run may see another order.", ready(2, (4.4, 5.6), 2, 14)),
    )  # fmt: skip
    parts: list[str] = []
    for n, panel in enumerate(shown):
        parts += timeline(28 + n * 204, *panel, end)
    parts += [
        arrow(96, 634, 116, 634, FAINT), text(122, 638, "requests with weights", font_size=12),
        arrow(266, 634, 286, 634), text(292, 638, "fragments", font_size=12),
        text(372, 638, "v2: the parameters that act, after two batches were trained on", font_size=12),
    ]  # fmt: skip
    return page(880, 654, "Who works when: rounds of depth 0 and 1, and ready mode", parts)


if __name__ == "__main__":
    (HERE / "runners.svg").write_text(flow())
    (HERE / "runners-time.svg").write_text(times())
