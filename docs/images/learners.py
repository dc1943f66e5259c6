"""Draws the pictures of docs/learners.md: who holds what, and one gradient step of two ranks.

python docs/images/learners.py
"""

from __future__ import annotations

from runners import FAINT, HERE, LEARNER, MONO, PAPER, RUNNER, arrow, box, page, text


def holds() -> str:
    """Who holds what."""
    parts = []
    for x, fill, name, what in (
        (18, "#f8f5ee", "rank 0: the process that you start", True),
        (480, "#f3f7fb", "rank 1: a child of it", False),
    ):
        parts += [
            text(x + 14, 30, name, font_weight="bold"),
            box(x, 40, 382, 330, fill, "#d9cdb0", stroke_dasharray="5 4"),
        ]
        held = [
            ("policy: agent, optimizers, normalisers", "the same bits on every rank", LEARNER),
            ("replay: index of all slots, rows of own ones", "where the algorithm has one", LEARNER),
            ("a batch [T, b] of own slots", f"slots {'0 to 7' if what else '8 to 15'} of 16", RUNNER),
            ("sampler, its workers or runners, environments", "of own slots", RUNNER),
        ]
        if what:
            held.append(("the run", "directory, log, checkpoints, evaluation, signals", LEARNER))
        for k, (title, below, color) in enumerate(held):
            y = 54 + 62 * k
            parts.append(box(x + 16, y, 350, 50, color))
            parts.append(text(x + 191, y + 21, title, font_weight="bold", text_anchor="middle"))
            parts.append(text(x + 191, y + 39, below, text_anchor="middle", font_size=12))
    for y, said in ((72, "gradients"), (136, "priorities"), (198, "advantages")):
        parts += [arrow(402, y, 476, y), arrow(476, y + 10, 402, y + 10)]
        parts.append(text(440, y - 8, said, text_anchor="middle", font_size=11))
    parts += [arrow(402, 322, 476, 322, FAINT), text(440, 314, "orders", text_anchor="middle", font_size=10)]
    parts.append(text(440, 396, "No observation leaves the rank that collected it, unless a normaliser asks for those of all.",
                      text_anchor="middle", font_size=12, fill=FAINT))  # fmt: skip
    return page(880, 412, "What each rank holds, and what travels between them", parts)


def step() -> str:
    """One minibatch of two ranks."""
    parts = [text(18, 30, "one gradient step", font_weight="bold")]
    rows = ["3", "11", "7", "0", "14", "5", "9", "2"]
    parts.append(text(18, 66, "the next 8 rows of the order over all valid rows, equal on both ranks"))
    for k, row in enumerate(rows):
        mine = int(row) < 8
        parts.append(box(480 + 44 * k, 46, 38, 28, LEARNER if mine else RUNNER))
        parts.append(text(499 + 44 * k, 65, row, text_anchor="middle", font_family=MONO))
    for y, name, kept, fill in (
        (104, "rank 0 has 5 of them", ["3", "7", "0", "5", "2"], LEARNER),
        (160, "rank 1 has 3", ["11", "14", "9"], RUNNER),
    ):
        parts.append(text(18, y + 22, name))
        for k, row in enumerate(kept):
            parts += [
                box(170 + 44 * k, y, 38, 32, fill),
                text(189 + 44 * k, y + 21, row, text_anchor="middle", font_family=MONO),
            ]
        parts.append(arrow(396, y + 16, 432, y + 16))
        parts.append(box(436, y, 196, 32, PAPER))
        parts.append(
            text(
                534,
                y + 21,
                f"{len(kept)} x [gradients, loss, metrics], {len(kept)}",
                text_anchor="middle",
                font_size=11,
            )
        )
        parts.append(arrow(636, y + 16, 672, 148))
    parts += [
        box(676, 124, 186, 48, PAPER),
        text(769, 144, "all-reduce: sum", text_anchor="middle", font_weight="bold"),
        text(769, 162, "then divide by 8", text_anchor="middle", font_size=12),
        text(440, 226, "The mean over 8 rows, bit-equal on both: the same norm, the same clipping, the same step, or none where it is not "
             "finite.", text_anchor="middle", font_size=12, fill=FAINT),
    ]  # fmt: skip
    return page(880, 244, "A gradient step of two ranks", parts)


if __name__ == "__main__":
    (HERE / "learners.svg").write_text(holds())
    (HERE / "learners-step.svg").write_text(step())
