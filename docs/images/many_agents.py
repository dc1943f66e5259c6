"""Draws the pictures of docs/many-agents.md: seats, groups and turns.

python docs/images/many_agents.py
"""

from __future__ import annotations

from typing import NamedTuple

from runners import FAINT, HERE, LEARNER, LINE, MONO, PAPER, RUNNER, arrow, box, page, text

GONE = "#eceff2"


def seats() -> str:
    """Agents of two environments, the policies that play them, and the columns of each policy's batch."""
    mapping = {"adversary_0": "prey", "agent_0": "pack", "agent_1": "pack"}
    colors = {"prey": LEARNER, "pack": RUNNER}
    count = {name: list(mapping.values()).count(name) for name in colors}
    parts = [text(18, 26, "environments, and the agents in them", font_weight="bold")]
    parts.append(text(480, 26, "a SampleBatch for each policy: a column is a seat", font_weight="bold"))
    left = {"prey": 492, "pack": 640}
    for name, x in left.items():
        parts.append(text(x, 60, f'"{name}": {count[name]} seat{"s" * (count[name] > 1)}', font_family=MONO))
        parts.append(text(x, 78, f"[T, {2 * count[name]}]", font_size=12, fill=FAINT))
    taken = dict.fromkeys(colors, 0)
    for env in range(2):
        y = 44 + 140 * env
        parts.append(box(18, y, 190, 122, "#f8f5ee", "#d9cdb0", stroke_dasharray="5 4"))
        parts.append(text(28, y + 18, f"environment {env}", font_size=12, fill=FAINT))
        for k, (agent, policy) in enumerate(mapping.items()):
            row = y + 28 + 31 * k
            parts.append(box(30, row, 166, 24, colors[policy]))
            parts.append(text(113, row + 16, agent, text_anchor="middle", font_family=MONO, font_size=12))
            column = taken[policy]
            taken[policy] += 1
            x = left[policy] + 44 * column
            parts.append(box(x, 92, 38, 200, colors[policy]))
            parts.append(text(x + 19, 110, str(column), text_anchor="middle", font_family=MONO))
            parts.append(text(x + 19, 306, f"env {env}", text_anchor="middle", font_size=10))
            parts.append(text(x + 19, 319, f"seat {column % count[policy]}", text_anchor="middle", font_size=10))
            parts.append(arrow(200, row + 12, 300, row + 12, FAINT))
            parts.append(text(306, row + 16, f"column {column} of {policy}", font_size=12))
    parts.append(
        text(18, 346, "Seat i of policy p in environment e is column e * seats[p] + i. An empty seat idles: its rows are not valid.",
             font_size=12, fill=FAINT)
    )  # fmt: skip
    return page(880, 360, "Agents, the policies that play them, and the columns of their batches", parts)


def groups() -> str:
    """One step of environments whose agents act at once: a forward for each policy, then the step."""
    parts = [text(18, 26, "agents act at once (Parallel): a row is an env step", font_weight="bold")]
    lanes = (("policy prey", 60, LEARNER), ("policy pack", 110, RUNNER), ("environments", 160, PAPER))
    for name, y, _ in lanes:
        parts.append(text(18, y + 21, name))
    for t in range(3):
        x = 130 + 236 * t
        parts += [
            box(x, 60, 70, 32, LEARNER),
            text(x + 35, 80, "act", text_anchor="middle"),
            box(x + 76, 110, 70, 32, RUNNER),
            text(x + 111, 130, "act", text_anchor="middle"),
            box(x + 152, 160, 74, 32, PAPER),
            text(x + 189, 180, f"step {t}", text_anchor="middle"),
            bend(x + 35, 92, x + 150, 182),
            bend(x + 111, 142, x + 150, 170),
            text(x + 35, 54, f"row {t}", text_anchor="middle", font_size=10, fill=FAINT),
            text(x + 111, 104, f"row {t}", text_anchor="middle", font_size=10, fill=FAINT),
        ]
    parts.append(
        text(18, 222, "A group is a policy and its columns: one forward for all its seats of all environments, then one step of "
             "each environment.", font_size=12, fill=FAINT)
    )  # fmt: skip
    return page(880, 238, "Groups of two policies over three steps", parts)


def bend(x0: float, y0: float, x1: float, y1: float) -> str:
    """An arrow down from a place, then to the right."""
    return f'<path d="M{x0:g} {y0:g} V{y1:g} H{x1:g}" stroke="{LINE}" fill="none" marker-end="url(#tip)"/>'


class Move(NamedTuple):
    """A turn: who moved, and whether it ended the game."""

    agent: str
    last: bool = False


GAMES = [Move("A"), Move("B"), Move("A", True), Move("A"), Move("B"), Move("A", True), Move("A"), Move("B")]
"""Turns of one environment: two games of three moves, and the beginning of the next."""
T = 4


def turns() -> str:
    """Moves of a game in time, and the rows of both players' batches that they become; T = 4."""
    parts = [text(18, 26, "agents act in turn (AEC): a row is an agent's own turn", font_weight="bold")]
    parts.append(text(18, 62, "the game"))
    for k, move in enumerate(GAMES):
        x = 130 + 92 * k
        fill = LEARNER if move.agent == "A" else RUNNER
        parts.append(box(x, 42, 84, 30, fill))
        end = ", end" if move.last else ""
        parts.append(text(x + 42, 62, f"{move.agent}'s move{end}", text_anchor="middle", font_size=10))
    for lane, (agent, y, fill) in enumerate((("A", 104, LEARNER), ("B", 176, RUNNER))):
        parts.append(text(18, y + 21, f"batch of {agent}'s policy"))
        for k, (kind, mark) in enumerate(rows(agent)[:6]):
            x = 156 + 114 * k + (24 if k >= T else 0)
            color = fill if kind == "turn" else GONE if kind != "open" else PAPER
            dash = {"stroke_dasharray": "4 3"} if kind == "open" else {}
            parts.append(box(x, y, 108, 32, color, LINE, **dash))
            parts.append(text(x + 54, y + 20, mark, text_anchor="middle", font_size=11 if len(mark) < 16 else 10))
            if lane == 0:
                name = f"row {k}" if k < T else f"next row {k - T}"
                parts.append(text(x + 54, y - 6, name, text_anchor="middle", font_size=10, fill=FAINT))
    parts += [
        text(18, 238, "A row closes when the agent's next turn, or its end, comes: its reward is all that the agent "
             "was paid since its action.", font_size=12, fill=FAINT),
        text(18, 256, "A turn that is open at the end of a batch moves, action and all, to row 0 of the next; "
             "the column idles meanwhile.", font_size=12, fill=FAINT),
    ]  # fmt: skip
    return page(880, 270, "Turns of a game as rows of two batches", parts)


def rows(agent: str) -> list[tuple[str, str]]:
    """Kind and text of an agent's rows in a batch of T rows and in the beginning of the next, by the rules of a pool."""
    filled: dict[str, list[tuple[str, str]]] = {"A": [], "B": []}
    turn = dict.fromkeys(filled, 0)
    open_: dict[str, int] = {}
    first = True
    for move in GAMES:
        if first and len(filled[move.agent]) == T:  # it has no row left: the batch ends with its turn waiting
            open_.pop(move.agent, None)
            for other, own in filled.items():
                moved = own.pop(open_[other]) if other in open_ else None
                own += [("idle", "idle")] * (T - len(own))
                if moved is not None:
                    own.append(("open", f"{moved[1]}, moved"))
                    open_[other] = T
            first = False
        own = filled[move.agent]
        turn[move.agent] += 1
        open_[move.agent] = len(own)
        own.append(("turn", f"turn {turn[move.agent]}"))
        if move.last:
            for other, at in open_.items():
                kind, said = filled[other][at]
                filled[other][at] = kind, f"{said}, end"
                filled[other].append(("reset", "reset row"))
            open_.clear()
    return filled[agent]


if __name__ == "__main__":
    (HERE / "agents-seats.svg").write_text(seats())
    (HERE / "agents-groups.svg").write_text(groups())
    (HERE / "agents-turns.svg").write_text(turns())
