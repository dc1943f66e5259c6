"""A whole run as one frozen tree of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.algos import ALGOS
from penstock.core.config import differences, known_names
from penstock.core.errors import ConfigError
from penstock.core.limits import Count, Positive, Whole, check_settings
from penstock.core.protocols import require_members
from penstock.envs.ids import is_simulator_id
from penstock.envs.make import Checks, EnvConfig, StateOf, Wrapper, as_wrappers, refuse_made
from penstock.run.tracking.tracker import check_names

if TYPE_CHECKING:
    from penstock.learn.algorithm import Algorithm
    from penstock.samplers.sampler import SamplerSettings
else:  # settings are read where torch is not loaded, such as for help
    Algorithm = SamplerSettings = Any


@dataclass(frozen=True)
class RunConfig:
    """Length, seed, evaluation and files of a run."""

    __new__ = known_names

    steps: Count = 1_000_000
    """Environment steps; the run ends with the batch that reaches them."""
    seed: Whole = 0
    """The seed of every random number of the run."""
    dir: str | Path | None = None
    """Run directory; must be new or empty. None: runs/ENV/ALGO/TIME-sSEED."""
    stop: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics that end the run once all are reached: `--run.stop rollout/ep_rew_mean 475`, or the same as a dict."""
    eval_interval: Whole = 0
    """Environment steps between evaluations; 0: only one at the end."""
    eval_episodes: Whole = 20
    """Episodes of an evaluation; 0 for none at all."""
    checkpoint_interval: Whole = 100_000
    """Environment steps between checkpoints, besides one at the end; 0: only that."""
    keep: Count = 3
    """Checkpoints kept, besides the best by evaluation."""
    keep_replays: Count = 2
    """Newest checkpoints that keep their replay; the others can be loaded as a policy, but not resumed."""
    device: str = "cpu"
    """Device of the networks: cpu, cuda or cuda:1; `auto` becomes cuda if this machine has a CUDA device, else cpu."""
    learner_threads: Count | Literal["auto"] = 1
    """Torch's threads for learning, set for the whole process; agents act with one thread, as in workers.

    "auto" times training on a copy with 1 thread up to one for each core, and stores the fastest in the run.
    """
    learners: Count = 1
    """Processes that train together, each on its share of the slots, as one learner would on all."""
    learner_backend: Literal["processes", "ray"] = "processes"
    """Where learners live: `processes` of this machine, or `ray`: actors in a placement group."""
    learner_address: str = ""
    """Ray cluster of the learners, like `RunnerSampler.address`; "": the sampler's if its runners are on Ray, else
    local."""
    learner_timeout_s: Positive = 300.0
    """Seconds that a learner waits for another one, which may still be sampling, before that one counts as hung."""
    log_interval: Whole = 1_000
    """Environment steps between rows of metrics; 0: a row for every batch. Evaluations are always logged."""
    trackers: tuple[str, ...] = ()
    """Where the run is shown besides metrics.jsonl and progress.csv: `tensorboard`, `wandb`, `mlflow`, `trackio`, or
    your own as `module:NAME` (docs/trackers.md)."""
    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """Display in the terminal."""
    trace: str | None = None
    """File name in .json for a timeline of 20 batches, process by process, which Perfetto opens; None for none."""
    eval_max_steps: Count = 27_000
    """Steps after which an evaluation cuts an episode; it counts with its return so far, and in `eval/cut_episodes`.

    The default is the limit of Atari's published protocol, 108,000 frames.
    """
    eval_slots: Count = 16
    """Largest number of environments side by side in an evaluation; each plays its share of the episodes."""
    eval_in: Literal["own", "training"] = "own"
    """Where evaluations play: in environments of their own, or (`training`) in those of training, one episode of each
    slot, after which all reset: for simulators of which a process holds one."""
    eval_workers: Whole = 0
    """Processes that play the evaluations between start and end beside training, which goes on meanwhile; 0: training
    waits for each.

    An evaluation then counts, for the log, `stop` and the best policy, where the next one is due.
    """
    video_interval: Whole = 0
    """Environment steps between videos of one episode in the environment of evaluations, in `videos/`; 0: none.

    Training waits for each. Needs the extra `video`, and an environment that knows `render_mode="rgb_array"`.
    """
    eval_exploitability: bool = False
    """Evaluations also report the exact `eval/exploitability`, over as many starts as they have episodes. Only for
    turn-based games with a tree small enough to enumerate (docs/self-play.md)."""
    each: str | None = None
    """A function as `module:name`, called with each iteration (`penstock.Iteration`) before it is logged."""
    compile: bool = False
    """Compile losses, and with replay also targets, by `torch.compile`. This takes up to a minute for each shape of a
    minibatch, before the first update and again on resume. Meant for CUDA: a CPU gains little."""
    precision: Literal["float32", "bf16"] = "float32"
    """Precision of the products of convolutions and hidden layers in training; `bf16` is refused where the processor
    does not support it.

    Acting, parameters, optimizers, memories and output layers are always float32.
    """

    def __post_init__(self) -> None:
        if isinstance(self.dir, Path):
            object.__setattr__(self, "dir", str(self.dir))
        check_settings(self, "run.")
        check_names(self.trackers)
        if self.device == "auto":
            import torch  # which settings do without where they are only read

            object.__setattr__(self, "device", "cuda" if torch.cuda.device_count() else "cpu")
        if self.dir == "":
            raise ConfigError("run.dir=''; expected a directory for the run, or None for one named after the time")
        for name, value in self.stop.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"run.stop[{name!r}]={value!r}; expected the number to reach, e.g. 475")
        if self.eval_interval and not self.eval_episodes:
            raise ConfigError(
                f"run.eval_interval={self.eval_interval} with eval_episodes=0; set eval_episodes, usually 20"
            )
        if self.eval_workers and not self.eval_interval:
            raise ConfigError(
                f"run.eval_workers={self.eval_workers} with eval_interval=0, which evaluates at the end only; set "
                f"eval_interval, e.g. {max(self.steps // 20, 1)}"
            )
        if self.eval_workers and self.eval_in == "training":
            raise ConfigError(
                f"run.eval_in='training' with eval_workers={self.eval_workers}, whose processes have environments of "
                "their own; leave one of them out"
            )
        if self.eval_exploitability and not self.eval_episodes:
            raise ConfigError("run.eval_exploitability with eval_episodes=0; set eval_episodes, usually 20")
        if self.learners > 1 and self.learner_threads == "auto":
            raise ConfigError(
                f"run.learners={self.learners} with learner_threads='auto', which times one learner; give a number"
            )
        if self.compile and self.learner_threads == "auto":
            raise ConfigError(
                "run.compile=True with learner_threads='auto', which would time compilers; give a number of threads"
            )
        if self.trace is not None and not self.trace.endswith(".json"):
            raise ConfigError(f"run.trace={self.trace!r}; expected a name that ends in .json, e.g. trace.json")


@dataclass(frozen=True, repr=False)
class Experiment:
    """Environment, algorithm, sampler and run; `ps.train` trains it."""

    __new__ = known_names

    env: str | Callable[..., Any] | EnvConfig
    """A Gymnasium id, `module:qualname`, a callable that makes an environment, or an EnvConfig."""
    algo: Algorithm
    """Settings of an algorithm, e.g. `ps.PPO(lr=3e-4)`."""
    sampler: SamplerSettings | Literal["auto"] | None = None
    """Settings of a sampler; None: a SerialSampler with the algorithm's T and B; "auto": the fastest measured here."""
    run: RunConfig = field(default_factory=RunConfig)
    """Length, seed, evaluation, checkpoints and directory."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the environment."""
    wrappers: tuple[Wrapper, ...] = ()
    """Wrappers of each environment, applied in order: callables, `module:qualname`, short names, or one of these with
    arguments, e.g. `("FrameStackObservation", {"stack_size": 4})`; see `EnvConfig.wrappers`."""
    info_keys: tuple[str, ...] = ()
    """Numeric keys of the step `info` to record and log; `is_success` always is."""
    imports: tuple[str, ...] = ()
    """Modules whose import registers environment ids, such as `ale_py`."""
    env_checks: Checks = "sampled"
    """Checks of values: sampled, always, finite or off, see `EnvConfig.checks`; shapes and dtypes are always
    checked."""
    env_drop: tuple[str, ...] = ()
    """Keys of a Dict observation to leave out."""
    env_text: Whole = 0
    """Length in bytes of the array that each text in the observation becomes; 0: text is refused."""
    env_mask: str | None = None
    """Key of the `info` that holds an action mask, which moves into the observation. None: calls `action_masks()` if
    the environment has it; "": no mask."""
    env_state: StateOf = ""
    """With many agents: state for critics, under the key `state`: `env`, the environment's, or `joint`, all
    observations."""
    eval_env: str | Callable[..., Any] | EnvConfig | None = None
    """Environment of evaluations, which choose the best checkpoint; None: as in training.

    Unless it is an EnvConfig, wrappers, options and all other settings but the keyword arguments are as in training.
    """
    eval_env_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of `eval_env`; without an `eval_env`, added to those of `env`, e.g. {"levels": "held-out"}."""
    env_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Passed to every `reset(options=...)` of the environments, in evaluations too, e.g. {"level": 3}."""

    def __post_init__(self) -> None:
        refuse_made(self.env)
        object.__setattr__(self, "wrappers", as_wrappers(self.wrappers))
        check_settings(self)
        if isinstance(self.algo, type) or not (is_dataclass(self.algo) or hasattr(self.algo, "build")):
            hint = f"did you mean {self.algo.__name__}()?" if isinstance(self.algo, type) else "e.g. ps.PPO(lr=3e-4)"
            raise ConfigError(f"algo={self.algo!r}; expected an algorithm's settings with build(spec), {hint}")
        # They import torch, as every algorithm and sampler does and help must not.
        from penstock.learn.algorithm import Algorithm
        from penstock.samplers import SAMPLERS
        from penstock.samplers.sampler import SamplerSettings

        require_members(self.algo, Algorithm, "docs/writing-an-algorithm.md")
        if isinstance(self.sampler, RunConfig):
            raise ConfigError("sampler=RunConfig(...); expected a sampler's settings: pass it as run=RunConfig(...)")
        if isinstance(self.sampler, (str, type)) and self.sampler != "auto":
            text = self.sampler if isinstance(self.sampler, str) else self.sampler.__name__
            classes = {name: path.rpartition(":")[2] for name, path in SAMPLERS.items()}
            meant = classes.get(text.lower(), text if text in classes.values() else "")
            own = f"ps.{meant}(...)" if meant else "a sampler's settings, e.g. ps.SerialSampler(T=128, B=16),"
            raise ConfigError(f"sampler={self.sampler!r}; expected {own} or 'auto'")
        if self.sampler not in (None, "auto"):
            require_members(self.sampler, SamplerSettings, "docs/writing-a-sampler.md")
        names = ("env_kwargs", "env_options", "wrappers", "info_keys", "imports", "env_drop", "env_text", "env_state")
        given = [name for name in names if getattr(self, name)] + ["env_mask"] * (self.env_mask is not None)
        given += ["env_checks"] * (self.env_checks != "sampled")
        if isinstance(self.env, EnvConfig) and given:
            raise ConfigError(f"env is an EnvConfig and {', '.join(given)} given beside it; put them into it")
        for name in ("env", "eval_env"):
            own = getattr(self, name)
            if isinstance(own, EnvConfig) and own.evaluation is not None:
                raise ConfigError(f"{name} is an EnvConfig with evaluation=...; give that as the experiment's eval_env")
        if self.run.eval_in == "training" and (self.eval_env is not None or self.eval_env_kwargs):
            raise ConfigError("run.eval_in='training' with an eval_env or eval_env_kwargs; leave one of them out")
        if isinstance(self.eval_env, EnvConfig) and self.eval_env_kwargs:
            raise ConfigError("eval_env is an EnvConfig and eval_env_kwargs are given; put them into it")

    def __repr__(self) -> str:
        return differences(self)

    @property
    def env_config(self) -> EnvConfig:
        """The settings that make the environments; a simulator's are on the run's device unless they name another."""
        there = self.run.eval_in == "training"
        if isinstance(self.env, EnvConfig):
            return replace(self.env, eval_in_training=True) if there else self.env
        return EnvConfig(
            self.env,
            self._env_kwargs(self.env, self.env_kwargs),
            self.wrappers,
            self.info_keys,
            self.imports,
            self.env_checks,
            self.env_drop,
            self.env_text,
            self.env_mask,
            state=self.env_state,
            options=self.env_options,
            eval_in_training=there,
        )

    @property
    def eval_env_config(self) -> EnvConfig:
        """The settings that make the environments of evaluations."""
        config = self.env_config
        if self.eval_env is None:
            return replace(config, kwargs={**config.kwargs, **self.eval_env_kwargs})
        if isinstance(self.eval_env, EnvConfig):
            return self.eval_env
        return replace(config, env=self.eval_env, kwargs=self._env_kwargs(self.eval_env, self.eval_env_kwargs))

    def _env_kwargs(self, env: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        simulated = isinstance(env, str) and is_simulator_id(env)
        return {"device": self.run.device, **given} if simulated else given

    @property
    def sampler_settings(self) -> SamplerSettings:
        """The sampler's settings; with None or "auto", a SerialSampler with the algorithm's T and B."""
        if self.sampler is None or self.sampler == "auto":
            from penstock.samplers.serial import SerialSampler  # it loads torch

            algo: Any = self.algo
            return SerialSampler(T=algo.batch.T, B=algo.batch.B)
        return self.sampler

    @property
    def algo_name(self) -> str:
        """The name on the command line: ppo, discrete-sac, ...; of a user's own one, its class name in lower case."""
        cls = type(self.algo)
        own = f"{cls.__module__}:{cls.__qualname__}"
        return next((name for name, path in ALGOS.items() if path == own), cls.__name__.lower())
