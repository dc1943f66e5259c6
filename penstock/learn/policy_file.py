"""One safetensors file that acts alone: parameters, and in its header the settings and spaces to build the policy."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from penstock.agents.parameters import copies_on_cpu
from penstock.core.config import to_plain, unstorable
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.files import open_stored, write_atomic
from penstock.core.machine import free_memory
from penstock.core.spec import Specs, specs_to_plain

FORMAT = 1
_KEY = "penstock"
_LARGEST_HEADER = 100_000_000
"""Bytes; the safetensors library has the same limit."""
_DAMAGE = LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError


@dataclass(frozen=True)
class PolicyFile:
    """The content of a policy's file; nothing that it names was imported."""

    plain: dict[str, Any]
    """Settings of the algorithm, as `to_plain` returns them."""
    spec: dict[str, Any]
    """Spaces of the policies, in the form that `specs_to_plain` returns."""
    seed: int
    parameters: dict[str, Tensor]
    digest: str
    """sha256 of the text in the header that holds all but the parameters."""


def save_policy(path: str | Path, settings: Any, spec: Specs, seed: int, parameters: Mapping[str, Tensor]) -> Path:
    """Writes the file; see `Policy.save`. An existing one is replaced, and is whole at any moment."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ConfigError(f"policy.save({str(path)!r}); expected a name that ends in .safetensors")
    if not callable(getattr(settings, "build", None)):
        raise ConfigError(
            f"policy.save: settings of {type(settings).__name__} have no build(spec, seed, device), by which ps.load "
            "makes the policy again; save its weights by safetensors.torch.save_file(policy.agent.state_dict(), path)"
        )
    tensors = copies_on_cpu(parameters)
    content = {"format": FORMAT, "algo": to_plain(settings), "spec": specs_to_plain(spec), "seed": seed}
    if lost := unstorable(content["algo"], "algo"):
        listed = ", ".join(f"{name}={said:.100}" for name, said in lost.items())
        warnings.warn(
            f"{path} cannot hold {listed}: ps.load takes agent= and policy_mapping_fn= again; move anything else to "
            "the top of a module that can be imported, or it cannot be loaded",
            stacklevel=3,
        )
    content["sha256"] = _digest_of_tensors(safetensors.torch.save(tensors))
    data = safetensors.torch.save(tensors, {_KEY: json.dumps(content)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    return path


def read_policy_file(path: Path) -> PolicyFile:
    """Reads a file that `save_policy` wrote.

    Raises:
        CheckpointError: it cannot be read, is no safetensors file, is cut short or damaged, has no header of penstock,
            or one of another format. The message names the file and the cure.
    """
    try:
        with open_stored(path, path.parent) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            start += file.read(min(int.from_bytes(start, "little"), _LARGEST_HEADER))
            header, end = _header(path, start)
            if size != end:
                odd = f"is cut short: it has {size:,} of" if size < end else f"has {size:,} bytes; expected"
                raise CheckpointError(f"{path} {odd} {end:,} bytes; copy it again")
            if size > (free := free_memory()):
                raise CheckpointError(f"{path} has {size / 1e9:,.1f} GB; free is {free / 1e9:,.1f} GB of memory")
            data = start + file.read(size - len(start))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    about = header.get("__metadata__", {})
    text = about.get(_KEY) if isinstance(about, dict) else None
    if text is None:
        raise CheckpointError(
            f"{path} has weights and no header of penstock; expected a file that policy.save(path) wrote. Weights "
            "alone go into a policy of the same settings by policy.load_parameters(safetensors.torch.load_file(path))"
        )
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} is a policy file of format {content['format']!r}; this penstock reads format {FORMAT}: use "
                "the version that wrote it"
            )
        if content["sha256"] != _digest_of_tensors(data):
            raise ValueError("its weights are not those that were saved")
        parameters = safetensors.torch.load(data)
        return PolicyFile(
            dict(content["algo"]),
            dict(content["spec"]),
            int(content["seed"]),
            parameters,
            hashlib.sha256(text.encode()).hexdigest(),
        )
    except (*_DAMAGE, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); copy it again") from error


def _header(path: Path, data: bytes) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the bytes that the whole file should have."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 9 or data[8:9] != b"{" or size > _LARGEST_HEADER:
        raise CheckpointError(f"{path} is no safetensors file; expected one that policy.save(path) wrote")
    if len(data) < 8 + size:
        raise CheckpointError(
            f"{path} is cut short: it has {len(data):,} bytes, and its header alone more; copy it again"
        )
    try:
        header = json.loads(data[8 : 8 + size])
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        return header, 8 + size + max(ends, default=0)
    except _DAMAGE as error:
        raise CheckpointError(f"{path} is damaged in its header ({type(error).__name__}); copy it again") from error


def _digest_of_tensors(data: bytes) -> str:
    """sha256 of what follows the header."""
    return hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
