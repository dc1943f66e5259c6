"""Encoders of a user's own (`net.encoder`), and the weights that an encoder starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.agents.own.probe import check_module
from penstock.core.config import import_object
from penstock.core.errors import ConfigError, nearest
from penstock.core.tree import Tree

if TYPE_CHECKING:
    from penstock.agents.networks import Net

EncoderFn: TypeAlias = Callable[[Any], nn.Module]
"""Makes an encoder from the spec of an observation: a class, a function, or a `functools.partial`."""
_WHOLE = "obs"
"""The name of an encoder of the whole observation among an agent's modules: `encoder.own.obs`."""


def own_encoders(obs: Tree, net: Net) -> dict[str | None, nn.Module]:
    """The encoders that `net.encoder` makes, by key of a Dict observation, or by None for all of it; checked.

    Raises:
        ConfigError: a key that the observation lacks, an encoder without `features`, or one that answers wrongly.
    """
    if net.encoder is None:
        return {}
    if not isinstance(net.encoder, Mapping):
        return {None: _made(name_at(None, net), net.encoder, obs)}
    found: dict[str | None, nn.Module] = {}
    for key, encoder in net.encoder.items():
        if not isinstance(obs, Mapping) or key not in obs:
            seen = f"; {nearest(key, obs)}" if isinstance(obs, Mapping) else " of a Dict, and it is none"
            raise ConfigError(f"net.encoder[{key!r}]: the observation has no such key{seen}")
        found[key] = _made(name_at(key, net), encoder, obs[key])
    return found


def start_encoders(modules: Mapping[str | None, nn.Module], net: Net) -> None:
    """Loads `net.encoder_weights` into encoders, own ones or those of images, and freezes them with `encoder_freeze`.

    Raises:
        ConfigError: no encoder to load or freeze, no such file, or weights that do not fit.
    """
    files = net.encoder_weights
    if (files or net.encoder_freeze) and not modules:
        name = "net.encoder_weights" if files else "net.encoder_freeze"
        raise ConfigError(f"{name} with no encoder: expected net.encoder, or an observation with an image")
    if isinstance(files, str):
        if len(modules) > 1:
            raise ConfigError(
                f"net.encoder_weights={files!r} with encoders of {', '.join(map(str, modules))}; expected one file for "
                "each that is loaded, by key: net.encoder_weights={'camera': 'camera.safetensors'}"
            )
        _load(next(iter(modules.values())), files)
    for key, file in files.items() if isinstance(files, Mapping) else ():
        if key not in modules:
            raise ConfigError(
                f"net.encoder_weights[{key!r}]: no encoder of that key; {nearest(key, map(str, modules))}"
            )
        _load(modules[key], file)
    for module in modules.values() if net.encoder_freeze else ():
        module.eval().requires_grad_(False)


def check_encoder(key: str | None, module: nn.Module, obs: Tree, net: Net) -> None:
    """Raises ConfigError unless an own encoder maps observations [N, *O] to [N, features], each row by itself."""
    at = name_at(key, net)
    check_module(at, module, module, obs, (_features(at, module),))


def module_name(key: str | None, number: int) -> str:
    """The name of an encoder among an agent's modules: its key, where modules may be called so, else its number."""
    if key is None:
        return _WHOLE
    return key if key.isidentifier() and not hasattr(nn.ModuleDict, key) else str(number)


def name_at(key: str | None, net: Net) -> str:
    """The setting and `module:NAME`, or the name of a class or function, for messages."""
    encoder: Any = net.encoder[key] if isinstance(net.encoder, Mapping) and key is not None else net.encoder
    function = getattr(encoder, "func", encoder)  # a partial's
    name = encoder if isinstance(encoder, str) else getattr(function, "__name__", type(function).__name__)
    return f"net.encoder={name}" if key is None else f"net.encoder[{key!r}]={name}"


def _made(at: str, encoder: Any, spec: Tree) -> nn.Module:
    if isinstance(encoder, nn.Module):
        raise ConfigError(
            f"{at} is a module that was made already; expected its class or a function of the observation's spec, "
            "since actor, critic and targets have one each: net.encoder=MyEncoder"
        )
    try:
        make = import_object(encoder) if isinstance(encoder, str) else encoder
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from error
    module = make(spec)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{at} returned {type(module).__name__}; expected a torch.nn.Module with the int `features`")
    _features(at, module)
    return module


def _features(at: str, module: nn.Module) -> int:
    features = getattr(module, "features", None)
    if isinstance(features, bool) or not isinstance(features, int) or features < 1:
        other = " (Stable-Baselines3's features_dim)" if hasattr(module, "features_dim") else ""
        seen = f"features={features!r:.40}" if hasattr(module, "features") else f"no `features`{other}"
        raise ConfigError(
            f"{at} made a {type(module).__name__} with {seen}; expected the width of what it returns: set "
            "self.features = 64 in its __init__"
        )
    return features


def _load(module: nn.Module, file: str) -> None:
    """Loads a safetensors or state dict file, of the module itself or of a network that has it in one place."""
    stored = _read(file)
    own = module.state_dict()
    first = next(iter(own), "")
    places = [key.removesuffix(first) for key in stored if key == first or key.endswith(f".{first}")]
    places = [place for place in places if all(place + name in stored for name in own)]
    at = places[0] if len(places) == 1 else ""
    taken = {name: stored[at + name] for name in own} if at else stored
    try:
        if len(places) > 1:
            raise RuntimeError(f"\nit has them more than once, under {', '.join(map(repr, places[:3]))}")
        module.load_state_dict(taken)
    except RuntimeError as error:
        seen = " ".join(str(error).partition("\n")[2].split())  # without torch's first line, which names no parameter
        raise ConfigError(
            f"net.encoder_weights={file!r} does not fit {type(module).__name__}: {seen:.300}; expected the state dict "
            "of that encoder: safetensors.torch.save_file(encoder.state_dict(), FILE)"
        ) from error


def _read(file: str) -> dict[str, Tensor]:
    setting = f"net.encoder_weights={file!r}"
    try:
        if Path(file).suffix == ".safetensors":
            import safetensors.torch  # only those who load weights need it so early

            return safetensors.torch.load_file(file)
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{setting} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # torch and safetensors have no common one
        raise ConfigError(
            f"{setting} is no file of weights: {' '.join(str(error).split())[:200]}; expected one of "
            "safetensors.torch.save_file or torch.save(module.state_dict(), FILE)"
        ) from error
    if isinstance(stored, Mapping) and isinstance(stored.get("state_dict"), Mapping):
        stored = stored["state_dict"]
    if not isinstance(stored, Mapping) or not all(isinstance(x, Tensor) for x in stored.values()):
        raise ConfigError(f"{setting} holds {type(stored).__name__}; expected a state dict, tensors by name")
    return dict(stored)
