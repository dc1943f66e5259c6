"""RankPlaces: the backend on which the learners of a run live, and on Ray the bundle of CPUs of each."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from penstock.actors.backend import Backend
from penstock.actors.make import make_backend
from penstock.core.errors import ConfigError
from penstock.run.plan import Plan
from penstock.samplers.runners.settings import RunnerSampler

_TIMEOUT_S = 60.0
_VISIBLE = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Leaves GPUs visible to an actor for which Ray counts none."""


class RankPlaces:
    """Where ranks 1 and up are started: processes of this machine, or actors of Ray, each in a bundle of one group.

    Rank 0 stays in the process of the run, which holds its directory, display and signals.

    Raises:
        ConfigError: the cluster cannot be reached, or has no room for the learners and their runners.
    """

    def __init__(self, plan: Plan) -> None:
        exp = plan.exp
        self._size, self._options = exp.run.learners, dict[str, Any]()
        self._places: list[Any] = [None] * self._size
        self._runners = [0.0] * self._size
        """CPUs of each rank's runners."""
        self._group: Any = None
        if exp.run.learner_backend == "processes":
            self.backend: Backend = make_backend("processes", self._size - 1, words=("run.learners", ""))
        else:
            self._on_ray(plan)

    def _on_ray(self, plan: Plan) -> None:
        from penstock.actors.cluster import MIN_STORE_BYTES  # each backend needs its own imports only
        from penstock.actors.on_ray import Ray, place_runners

        run = plan.exp.run
        address, self._runners, store_mb = _cluster(plan)
        own = [0, *[run.learner_threads] * (self._size - 1)]
        bundles = [float(a) + b for a, b in zip(own, self._runners)]
        cpus = max(os.cpu_count() or 1, math.ceil(sum(bundles)))
        self.backend = backend = Ray(address, float(own[1]), cpus, max(store_mb << 20, MIN_STORE_BYTES))
        try:
            self._places = self._placed(bundles, backend.cluster)
            print(f"penstock: {backend.cluster}; learners {self._size}", file=sys.stderr)
            place_runners(self.place(0))
        except BaseException:
            self.close()
            raise
        if run.device.startswith("cuda"):
            self._options["runtime_env"] = {"env_vars": _VISIBLE}

    def place(self, rank: int) -> Any:
        """The place of a rank's runners; None where it has none, or they go anywhere."""
        return self._places[rank] if self._runners[rank] else None

    def start(self, cls: type, args: Sequence[Any], rank: int) -> Any:
        """The handle of a rank's object, started in its place."""
        how = {"scheduling_strategy": self._places[rank], **self._options} if self._places[rank] is not None else {}
        return self.backend.start(cls, args, f"rank {rank}", **how)

    def address(self) -> str:
        """The address of this machine, "" where all ranks are of one."""
        from penstock.run.learners.rendezvous import address_of

        return address_of() if self.backend.name == "ray" else ""

    def close(self) -> None:
        """Kills remaining learners, frees the placement group, and leaves the cluster. A second call does nothing."""
        if self.backend.name == "ray":
            from penstock.actors.on_ray import place_runners

            place_runners(None)
            if self._group is not None and importlib.import_module("ray").is_initialized():
                importlib.import_module("ray.util").remove_placement_group(self._group)
            self._group = None
        self.backend.close()

    def _placed(self, bundles: list[float], cluster: Any) -> list[Any]:
        """Each rank's place: its bundle, once Ray has reserved all of them."""
        indices = [i for i, cpus in enumerate(bundles) if cpus]
        wanted = [{"CPU": bundles[i]} for i in indices]
        sizes = [node["Resources"].get("CPU", 0.0) for node in cluster.ray.nodes() if node["Alive"]]
        never = max(bundles) > max(sizes) or sum(bundles) > sum(sizes)
        if not never:
            self._group = importlib.import_module("ray.util").placement_group(wanted, strategy="PACK")
        if never or not self._group.wait(_TIMEOUT_S):
            places, nodes = (", ".join(f"{x:g}" for x in y) for y in ([bundles[i] for i in indices], sizes))
            free = cluster.ray.available_resources().get("CPU", 0.0)
            found = "can never have" if never else f"did not get within {_TIMEOUT_S:g} s"
            raise ConfigError(
                f"run.learners={self._size} needs places of {places} CPUs, which it {found} on the cluster at "
                f"{cluster.address}: its nodes have {nodes}, of which {free:g} are free; add nodes, stop other work "
                "there, or use fewer learners, learner_threads, runners or a smaller sampler.num_cpus"
            )
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        places = {i: strategies.PlacementGroupSchedulingStrategy(self._group, k) for k, i in enumerate(indices)}
        return [places.get(i) for i in range(len(bundles))]


def _cluster(plan: Plan) -> tuple[str, list[float], int]:
    """The cluster that learners and their runners share: its address, CPUs of each rank's runners, MB of its store."""
    exp, settings = plan.exp, plan.sampler
    given = exp.run.learner_address
    if not isinstance(settings, RunnerSampler) or settings.backend != "ray":
        return given or "local", [0.0] * exp.run.learners, 0
    if given and given != settings.address:
        raise ConfigError(
            f"run.learner_address={given!r} with sampler.address={settings.address!r}; learners and their runners "
            "share a cluster: leave the first out"
        )
    own = settings.shares(exp.run.learners)
    return settings.address, [x.runners * settings.num_cpus for x in own], settings.object_store_mb
