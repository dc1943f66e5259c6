"""Report on this machine: versions, conflicts between packages, and whether a row's bits depend on its batch."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from penstock.agents.mlp import mlp_chain
from penstock.agents.networks import NatureCNN
from penstock.agents.recurrent import Memory
from penstock.core import VERSION
from penstock.core.batch import ROW_MULTIPLE, padded_rows
from penstock.core.machine import free_memory, read_machine, total_memory
from penstock.native.library import kernel, why
from penstock.run.affinity import default_workers, plan, ranges

Forward = Callable[[Tensor], Tensor]

_NEEDED = ("torch", "numpy", "gymnasium")
_OPTIONAL = {
    "ale-py": "atari",
    "mujoco": "mujoco",
    "pygame": "classic",
    "box2d": "box2d",
    "imageio-ffmpeg": "video",
    "ray": "ray",
    "envpool": "envpool",
    "onnxruntime": "export",
    "huggingface_hub": "hub",
}
"""Packages, with the extra of penstock that installs each, if there is one."""


@dataclass(frozen=True)
class Conflict:
    """A pair of packages that install together but do not work together."""

    package: str
    versions: str
    """As pip writes it, "<0.15"; empty for every version."""
    other: str
    other_versions: str
    symptom: str
    fix: str


CONFLICTS = (
    Conflict("dm-control", "", "mujoco", ">=4", "dm_control imports, and fails when it loads a model", "mujoco<4"),
    Conflict("mjlab", "", "mujoco", ">=4", "mjlab was written for mujoco 3", "mujoco<4"),
    Conflict("moviepy", "", "pillow", ">=12", "moviepy wants pillow below 12; penstock needs no moviepy", "pillow<12"),
    Conflict("rliable", "", "pandas", ">=3", "rliable cannot be imported", "pandas<3"),
    Conflict("arch", "<8", "pandas", ">=3", "arch cannot be imported", "pandas<3"),
    Conflict(
        "torchrl",
        "<0.15",
        "tensordict",
        ">=0.15",
        "torchrl breaks; pip falls back to a very old one",
        "tensordict<0.15",
    ),
    Conflict("tianshou", "", "pandas", ">=3", "tianshou wants pandas below 3", "pandas<3"),
    Conflict("tianshou", "", "filelock", ">=4", "tianshou wants filelock below 4", "filelock<4"),
    Conflict("tianshou", "", "ale-py", ">=0.9", "tianshou wants ale-py below 0.9", "ale-py<0.9"),
    Conflict("agilerl", "", "pettingzoo", ">=1.27", "agilerl wants pettingzoo below 1.27", "pettingzoo<1.27"),
)


def installed_version(package: str) -> str | None:
    """The installed version of a distribution; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def conflicts(version: Callable[[str], str | None] = installed_version) -> list[Conflict]:
    """The known conflicts whose two packages are both installed."""
    return [c for c in CONFLICTS if _fits(version(c.package), c.versions) and _fits(version(c.other), c.other_versions)]


def _fits(version: str | None, wanted: str) -> bool:
    """True if a version is in a range such as ">=4". Release numbers only: 4.0.0rc1 counts as 4.0.0."""
    if version is None or not wanted:
        return version is not None
    found = re.fullmatch(r"(<|>=|>)([\d.]+)", wanted)
    assert found, wanted
    have, limit = _release(version), _release(found[2])
    return have < limit if found[1] == "<" else have > limit if found[1] == ">" else have >= limit


def _release(version: str) -> tuple[int, ...]:
    numbers = [int(x) for x in re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def accelerators() -> list[str]:
    """Each CUDA device's name and memory."""
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"cuda:{i} {x.name}, {x.total_memory / 2**30:.0f} GiB" for i, x in enumerate(found)]


@dataclass(frozen=True)
class RowBits:
    """The row counts that give the same bits in one network."""

    network: str
    groups: tuple[tuple[int, ...], ...]
    """Unpadded row counts; those of one group give every row the same bits."""
    padded: bool
    """True if all counts give the same bits under the padding rule."""


def row_bits(network: str, forwards: Iterable[Forward], inputs: Tensor, counts: Iterable[int]) -> RowBits:
    """Runs the inputs [N, ...] through forwards in batches of each count, with other neighbours in every batch.

    Args:
        forwards: networks of one shape with different weights, since a difference in rounding may hide in one of them.
    """
    counts, forwards = tuple(counts), tuple(forwards)
    plain: dict[bytes, list[int]] = {}
    padded: set[bytes] = set()
    for n in counts:
        plain.setdefault(b"".join(_bits(f, inputs, n, n) for f in forwards), []).append(n)
        padded.add(b"".join(_bits(f, inputs, n, padded_rows(n)) for f in forwards))
    return RowBits(network, tuple(tuple(group) for group in plain.values()), len(padded) == 1)


def _bits(forward: Forward, inputs: Tensor, rows: int, padded: int) -> bytes:
    """The outputs of all inputs in their order, run in batches of `rows` with zeros up to `padded`."""
    out: list[Tensor] = []
    with torch.inference_mode():
        for start in range(0, len(inputs), rows):
            batch = inputs.new_zeros(padded, *inputs.shape[1:])
            chosen = [(start + i) % len(inputs) for i in range(rows)]
            batch[:rows] = inputs[chosen]
            out.append(forward(batch)[: min(rows, len(inputs) - start)].clone())
    return torch.cat(out).numpy().tobytes()


def measure_rows() -> list[RowBits]:
    """`row_bits` of the networks that agents are made of, on one thread; nothing else of torch's state is touched."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return [
                *(
                    row_bits(
                        f"MLP 64 x 64, outputs: {k}", [_mlp(k) for _ in range(4)], torch.randn(33, 4), range(1, 34)
                    )
                    for k in range(1, 5)
                ),
                row_bits("LSTM 64", [_memory("lstm") for _ in range(2)], torch.randn(33, 64), range(1, 34)),
                row_bits("GRU 64", [_memory("gru") for _ in range(2)], torch.randn(33, 64), range(1, 34)),
                row_bits(
                    "Nature CNN", [NatureCNN(4, 84, 84)], torch.rand(16, 4, 84, 84), (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
                ),
            ]
    finally:
        torch.set_num_threads(threads)


def _mlp(outputs: int) -> Forward:
    layers = [nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    weights = [p for layer in layers for p in (layer.weight, layer.bias)]
    return lambda x: mlp_chain(x, "tanh", weights, with_out=True)


def _memory(kind: str) -> Forward:
    memory = Memory(kind, 64, 64)  # pyright: ignore[reportArgumentType]

    def forward(x: Tensor) -> Tensor:
        first = torch.zeros(1, len(x), dtype=torch.bool)
        _, state = memory(x.unsqueeze(0), first, memory.initial_state(len(x)))  # so that the state is not all zeros
        return memory(x.unsqueeze(0), first, state)[0][0]

    return forward


def examine(console: Console | None = None) -> int:
    """Prints the whole report; returns 1 if the padding rule fails on this machine, else 0."""
    console = console or Console(highlight=False)
    console.print(_software())
    console.print(_machine())
    found = conflicts()
    for c in found:
        pair = f"{c.package} {installed_version(c.package)} with {c.other} {installed_version(c.other)}"
        console.print(Text(f"! {pair}: {c.symptom}; pip install '{c.fix}'", "yellow"), soft_wrap=True)
    if not found:
        console.print(f"No known conflict among the {len(CONFLICTS)} pairs of packages that are looked for.\n")
    measured = measure_rows()
    console.print(_rows_table(measured))
    broken = [x.network for x in measured if not x.padded]
    if broken:
        console.print(
            Text(
                f"The padding rule FAILS here for {', '.join(broken)}: a row's bits depend on how many rows lie beside "
                f"it, even in multiples of {ROW_MULTIPLE}. The same seed gives other batches in other samplers on this "
                "machine; please report this with the tables above.",
                "bold red",
            ),
            soft_wrap=True,
        )
        return 1
    console.print(
        Text(
            f"The padding rule holds: padded to a multiple of {ROW_MULTIPLE}, rows have the same bits whatever lies "
            "beside them, so the same seed gives the same batch in every sampler on this machine.",
            "bold green",
        ),
        soft_wrap=True,
    )
    return 0


def _software() -> Table:
    table = Table("package", "version", title="Software", title_justify="left")
    table.add_row("penstock", VERSION)
    table.add_row("python", platform.python_version())
    for name in _NEEDED:
        table.add_row(name, installed_version(name) or "[red]not installed")
    for name, extra in _OPTIONAL.items():
        hint = Text(f"not installed: pip install 'penstock[{extra}]'" if extra else "not installed", "dim")
        table.add_row(name, installed_version(name) or hint)
    return table


def _machine() -> Table:
    here = read_machine()
    cores, total = len(here.cpus), total_memory()
    limit = "" if here.quota is None or here.quota >= cores else f"; a control group grants {here.quota:g} of them"
    built = (
        ""
        if torch.cuda.is_available() or torch.version.cuda is None
        else f" (torch is built for CUDA {torch.version.cuda})"
    )
    table = Table("what", "here", title="Machine", title_justify="left")
    table.add_row("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    table.add_row("cores", f"{cores} of {os.cpu_count()} usable by this process{limit}")
    workers = default_workers(here, B=64)
    table.add_row("layout", str(here))
    table.add_row("placement", f"for 64 slots, {plan(here, workers).why}")
    table.add_row("vector instructions", torch.backends.cpu.get_cpu_capability())
    table.add_row("kernel of dense layers", f"{kernel()} ({why()})")
    table.add_row("memory", f"{min(free_memory(), total) / 2**30:.1f} GiB free of {total / 2**30:.1f}")
    table.add_row("accelerator", "\n".join(accelerators()) or f"none{built}")
    return table


def _rows_table(measured: Iterable[RowBits]) -> Table:
    table = Table(
        "network",
        "row counts that give the same bits",
        "padded",
        title="Bits of a row, by the number of rows in its batch (measured)",
        title_justify="left",
    )
    for x in measured:
        together = ["{" + ranges(group) + "}" for group in x.groups if len(group) > 1]
        alone = ranges(sorted(n for group in x.groups if len(group) == 1 for n in group))
        groups = "   ".join([*together, *([f"each alone: {alone}"] if alone else [])])
        table.add_row(x.network, groups, Text("the same", "green") if x.padded else Text("they differ", "red"))
    return table
