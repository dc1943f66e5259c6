"""Forged runs, checkpoints and datasets: nothing in them is executed, nothing hangs, and every message names the file."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.config import to_plain
from penstock.core.errors import PenstockError
from penstock.datasets.reader import open_dataset
from penstock.run.files.stored_experiment import read_config
from tests.params import slow_but
from tests.run.files.forging import (
    EXPERIMENT,
    deep_config,
    deep_manifest,
    elsewhere,
    huge_spec,
    in_place_of,
    linked,
    no_hang,
    openers,
    read_all,
    replay_of,
    tensor,
    with_array,
    with_config,
    with_index,
    with_state,
)

Forge = Callable[[Path], Path]
EVERY = {"load", "evaluate", "record", "resume", "init"}
PLAYED = {"evaluate", "record", "resume"}
SHELL = {"env": "os:system", "env_kwargs": {"command": "touch EXECUTED"}}
INNER = {"class": "penstock.samplers.serial:SerialSampler", "T": 8, "B": 1}
RUNNERS = {
    "class": "penstock.samplers.runners.settings:RunnerSampler",
    "runners": 2,
    "inner": INNER,
    "backend": "in-process",
}
FORGED: dict[str, tuple[Forge, set[str]]] = {
    # The code that a run names.
    "env": (with_config(lambda s: s.update(SHELL)), PLAYED),
    "env of a folder beside": (with_config(lambda s: s.update(env="sentinel:Env-v0")), PLAYED),
    "env through penstock": (with_config(lambda s: s.update(SHELL, env="penstock.run.files.rundir:subprocess.getoutput")),
                             PLAYED),
    "env of penstock that is none": (with_config(lambda s: s.update(env="penstock.envs.check:check_env",
                                                                   env_kwargs={"env": "sentinel:x"})), PLAYED),
    "env as an attribute of gymnasium": (
        with_config(lambda s: s.update(SHELL, env="gymnasium:envs.registration.importlib.import_module",
                                       env_kwargs={"name": "sentinel"})), PLAYED),
    "env as a function of penstock": (with_config(lambda s: s.update(env="penstock:resume",
                                                                    env_kwargs={"run_dir": "other", "trust": True})),
                                      PLAYED),
    "env as a private function": (with_config(lambda s: s.update(env="penstock.envs.atari:_imported",
                                                                env_kwargs={"module": "sentinel"})), PLAYED),
    "a class among keys": (with_config(lambda s: s.update(info_keys=[{"import": "sentinel:x"}])), PLAYED),
    "a class among metrics": (with_config(lambda s: s["run"].update(stop={"class": "sentinel:x"})), {"resume"}),
    "a class in a setting with a dot": (with_config(lambda s: s["algo"].update({"a.stop": {"class": "sentinel:x"}})),
                                        EVERY),
    "agent named like a device": (with_config(lambda s: s["algo"].update(agent="cuda:0")), EVERY),
    "a stored function": (with_config(lambda s: s.update(SHELL, env={"import": "subprocess:getoutput"})), PLAYED),
    "wrappers": (with_config(lambda s: s.update(wrappers=["sentinel:wrap"])), PLAYED),
    "a wrapper with arguments": (with_config(lambda s: s.update(wrappers=["sentinel:wrap(1)"])), PLAYED),
    "a wrapper beside its arguments": (with_config(lambda s: s.update(wrappers=[["sentinel:wrap", {"a": 1}]])), PLAYED),
    "code in a wrapper's arguments": (with_config(lambda s: s.update(wrappers=[
        {"import": "gymnasium.wrappers:TransformReward", "args": [], "kwargs": {"func": {"import": "sentinel:f"}}}])),
        PLAYED),
    "code beside a wrapper": (with_config(lambda s: s.update(wrappers=[
        ["TransformReward", {"func": {"tuple": [{"import": "sentinel:f"}]}}]])), PLAYED),
    "a wrapper that writes files": (with_config(lambda s: s.update(wrappers=["RecordVideo(video_folder='EXECUTED')"])),
                                    PLAYED),
    "a wrapper of a large array": (with_config(lambda s: s.update(wrappers=["FrameStackObservation(99999999999)"])),
                                   PLAYED),
    "a wrapper that is no text": (with_config(lambda s: s.update(wrappers=["TimeLimit(" + "-" * 3_000 + "1)"])), PLAYED),
    "env as a partial": (with_config(lambda s: s.update(
        env={"import": "importlib:import_module", "args": ["sentinel"], "kwargs": {}})), PLAYED),
    "code in the arguments of env": (with_config(lambda s: s.update(
        env={"import": "penstock.envs.toy:Bandit", "args": [{"import": "sentinel:x"}], "kwargs": {}})), PLAYED),
    "code in the arguments of agent": (with_config(lambda s: s["algo"].update(
        agent={"import": "penstock.agents.actor_critic:actor_critic", "args": [], "kwargs": {
            "settings": {"import": "sentinel:x"}}})), EVERY),
    "imports": (with_config(lambda s: s.update(imports=["sentinel"])), PLAYED),
    "agent": (with_config(lambda s: s["algo"].update(agent={"import": "sentinel:agent"})), EVERY),
    "agent as text": (with_config(lambda s: s["algo"].update(agent="sentinel:agent")), EVERY),
    "algorithm": (with_config(lambda s: s["algo"].update({"class": "sentinel:Algo"})), EVERY),
    "a class in a setting": (with_config(lambda s: s["algo"].update(net={"class": "sentinel:Net"})), EVERY),
    "sampler": (with_config(lambda s: s["sampler"].update({"class": "sentinel:Sampler"})), {"resume"}),
    "a cluster to join": (with_config(lambda s: s.update(sampler={**RUNNERS, "address": "auto"})), {"resume"}),
    "a cluster elsewhere": (with_config(lambda s: s.update(sampler={**RUNNERS, "address": "10.0.0.1"})), {"resume"}),
    "reward of goals": (with_config(lambda s: s["algo"]["replay"].update(hindsight=1, reward_fn="sentinel:f")), EVERY),
    # The files that it names.
    "env_kwargs with a file": (with_config(lambda s: s.update(env="Ant-v5", env_kwargs={"xml_file": "/x/ant.xml"})),
                               PLAYED),
    "folder of the replay": (with_config(lambda s: s["algo"]["replay"].update(dir="/nowhere/else")), {"resume"}),
    "trace": (with_config(lambda s: s["run"].update(trace="../x.json")), {"resume"}),
    # Sizes.
    "deep settings": (deep_config, EVERY),
    "hidden units": (with_config(lambda s: s["algo"]["net"].update(hidden=[10**6, 10**6])), {"load", "resume", "init"}),
    "layers": (with_config(lambda s: s["algo"]["net"].update(hidden=[8] * 100_000)), EVERY),
    "many layers": (with_config(lambda s: s["algo"]["net"].update(hidden=[8] * 1_500)), EVERY),
    "a large environment": (with_config(lambda s: s.update(env="penstock.envs.toy:BitFlip", env_kwargs={"n": 10**9})),
                            PLAYED),
    "slots of evaluations": (with_config(lambda s: s["run"].update(eval_slots=10**9, eval_episodes=10**9)), {"resume"}),
    "batches ahead": (with_config(lambda s: s.update(sampler={"class": "penstock.samplers.asynchronous:AsyncSampler",
                                                              "inner": {**INNER, "B": 2}, "depth": 10**9})), {"resume"}),
    "shards": (with_config(lambda s: s["algo"]["replay"].update(shards=10**5)), {"resume"}),
    "a number of 100 bits": (with_config(lambda s: s["run"].update(eval_episodes=10**30)), {"resume"}),
    "a number of 16,000 bits": (with_config(lambda s: s["run"].update(eval_episodes=int("9" * 4_000))), {"resume"}),
    "capacity": (with_config(lambda s: s["algo"]["replay"].update(capacity=10**14)), {"resume"}),
    "slots": (with_config(lambda s: s["sampler"].update(B=10**9)), {"resume"}),
    "workers": (with_config(lambda s: s["sampler"].update({"class": "penstock.samplers.cpu:CpuSampler",
                                                          "workers": 10**5, "B": 10**5})), {"resume"}),
    "runners": (with_config(lambda s: s.update(sampler={**RUNNERS, "runners": 10**5})), {"resume"}),
    "workers of runners": (with_config(lambda s: s.update(sampler={**RUNNERS, "runners": 100, "inner": {
        **INNER, "class": "penstock.samplers.cpu:CpuSampler", "workers": 100, "B": 100}})), {"resume"}),
    "an object store": (with_config(lambda s: s.update(sampler={**RUNNERS, "object_store_mb": 10**9})), {"resume"}),
    "observations": (huge_spec, EVERY),
    # Checkpoints.
    "an array of 40 TB": (with_array({"descr": "<f8", "shape": (5 * 10**12,)}), {"resume", "replay"}),
    "an array of objects": (with_array({"descr": "|O", "shape": (1,)}, b"\x01" * 8), {"resume", "replay"}),
    "a tensor of 40 TB": (with_state(lambda s: s["policy"].update(x=tensor(10**13))), EVERY | {"replay"}),
    "a head far away": (with_state(lambda s: replay_of(s)["index"].update(head=10**15)), {"resume", "replay"}),
    "no state of the policy": (with_state(lambda s: s.update(policy=[])), {"resume", "replay"}),
    "ends that are a number": (with_state(lambda s: s["trainer"]["recent"].update(terminated=3.5)), {"resume"}),
    "columns without arrays": (with_state(lambda s: s["trainer"]["recent"]["columns"].update(is_success={})), {"resume"}),
    "no time": (with_state(lambda s: s["trainer"].update(elapsed_s=[])), {"resume"}),
    "a score that is true": (with_state(lambda s: s["trainer"].update(best_score=True)), {"resume"}),
    "no betas": (with_state(lambda s: s["policy"]["optimizers"]["all"]["group"].update(betas={"$tuple": []})), {"resume"}),
    "metrics as a list": (with_state(lambda s: s["trainer"].update(pending=[])), {"resume"}),
    "no counters": (with_state(lambda s: s["policy"].pop("counters")), {"resume"}),
    "a version that is none": (with_state(lambda s: s["policy"]["counters"].update(version={})), {"resume"}),
    "a clock that is none": (with_state(lambda s: s["sampler"]["pool"].update(tick={})), {"resume"}),
    "a slot too few": (with_state(lambda s: s["sampler"]["pool"].update(idle=[False])), {"resume"}),
    "no sums": (with_state(lambda s: s["sampler"]["stats"].update({"return": {}})), {"resume"}),
    "a deep manifest": (deep_manifest, EVERY | {"replay"}),
    # Files that are none.
    "a FIFO for settings": (in_place_of("config.json", os.mkfifo), EVERY | {"plot"}),
    "a FIFO for metrics": (in_place_of("metrics.jsonl", os.mkfifo), {"resume"}),
    "a device for meta.json": (in_place_of("meta.json", linked("/dev/zero")), {"resume"}),
    "settings elsewhere": (in_place_of("config.json", linked("/proc/self/environ")), EVERY | {"plot"}),
    "checkpoints elsewhere": (in_place_of("checkpoints", linked("/tmp")), EVERY | {"replay"}),
    "evaluations elsewhere": (in_place_of("eval", linked("/tmp")), {"resume"}),
    "a lock elsewhere": (in_place_of(".lock", linked("/tmp/penstock-not-a-lock")), {"resume"}),
}  # fmt: skip
DATASETS: dict[str, Forge] = {
    "absolute": with_index(lambda index: index["shards"][0].update(dir="/etc")),
    "above": with_index(lambda index: index["shards"][0].update(dir="../data/000000")),
    "a file above": with_index(lambda index: index["shards"][0]["files"].update({"../x.npy": {"size": 0}})),
    "more steps": with_index(lambda index: index["shards"][0].update(steps=10**13)),
    "wide observations": with_index(lambda index: index["spec"]["obs"]["dict"]["a"]["leaf"].__setitem__(1, [1 << 50])),
    "a column elsewhere": elsewhere("000000/reward.npy"),
    "an index elsewhere": elsewhere("dataset.json"),
    "no shards": with_index(lambda index: index.update(shards={"a": 1})),
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("honest") / "run"
    ps.train(replace(EXPERIMENT, run=replace(EXPERIMENT.run, dir=str(run))))
    return run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, in which a module `sentinel` tells that it was imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    (tmp_path / "code").mkdir()
    tell = f"open({str(tmp_path / 'EXECUTED')!r}, 'w').close()\n"
    (tmp_path / "code" / "sentinel.py").write_text(tell)
    return tmp_path


@pytest.mark.parametrize("name", slow_but(sorted(FORGED.keys() - {"layers"}), [*FORGED]))
def test_a_forged_run(name: str, honest: Path, folder: Path) -> None:
    forge, refused = FORGED[name]
    shutil.copytree(honest, folder / "run")
    file = forge(folder / "run")
    for how, opener in openers(folder / "run", folder).items():
        before = set(sys.modules)
        with no_hang(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if how in refused:
                with pytest.raises(PenstockError) as told:
                    opener()
                assert str(file) in str(told.value), how
            elif how in ("load", "evaluate", "replay"):
                try:
                    opener()
                except PenstockError as error:
                    assert str(folder / "run") in str(error), how  # noqa: PT017
        assert "sentinel" not in set(sys.modules) - before, how
    assert not (folder / "EXECUTED").exists()


@pytest.mark.parametrize("name", DATASETS)
def test_a_forged_dataset(name: str, folder: Path) -> None:
    file = DATASETS[name](folder)
    with no_hang(), pytest.raises(PenstockError, match=str(file)):
        read_all(file)


FORGERY = "\x1b[2J\x1b[Hpenstock: this run is yours\r\n\u202e\x9b8m"


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(SHELL, env_kwargs={FORGERY: "a/b", "command": FORGERY}),
        lambda s: s.update(env=f"os:system{FORGERY}"),
        lambda s: s.update(wrappers=[f"os:system{FORGERY}"], imports=[FORGERY]),
        lambda s: s["algo"].update({"class": f"os:{FORGERY}"}),
        lambda s: s["algo"].update({FORGERY: "os:system"}),
        lambda s: s["run"].update({FORGERY: 1}),
        lambda s: s["algo"].update(net={"class": "penstock.agents.networks:Net", FORGERY: 1}),
    ],
)
def test_what_a_forged_run_says_cannot_be_taken_for_ours(
    change: Callable[[Any], Any], honest: Path, folder: Path
) -> None:
    run = folder / "run"
    shutil.copytree(honest, run)
    with_config(change)(run)
    with pytest.raises(PenstockError) as told:
        ps.resume(run, {"run.steps": 128})
    assert set(str(told.value)) <= {c for c in str(told.value) if c.isprintable()}
    assert "\\x1b[2J" in str(told.value)


WORDS = "'. This run is yours. env_kwargs.x='"


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(SHELL, env_kwargs={WORDS: "a/b"}),
        lambda s: s.update(SHELL, env_kwargs={"command": f"touch {WORDS}"}),
        lambda s: s.update(env=f"os:{WORDS}"),
        lambda s: s.update(wrappers=[f"os:{WORDS}"]),
        lambda s: s["algo"].update({"class": f"os:{WORDS}"}),
        lambda s: s["algo"].update({WORDS: "os:system"}),
    ],
)
def test_words_of_a_forged_run_stand_in_quotes(change: Callable[[Any], Any], folder: Path, honest: Path) -> None:
    shutil.copytree(honest, folder / "run")
    with_config(change)(folder / "run")
    with pytest.raises(PenstockError) as told:
        ps.resume(folder / "run", {"run.steps": 128})
    assert repr(WORDS)[1:-1] in str(told.value) and re.search(rf"\"[^\"]*{re.escape(WORDS)}[^\"]*\"", str(told.value))


@pytest.mark.parametrize("name", [f"run{FORGERY}", "run\u202ename", "run\nname"])
def test_a_folder_whose_name_a_terminal_obeys(name: str, honest: Path, folder: Path) -> None:
    run, data = folder / name, folder / f"data{name}"
    shutil.copytree(honest, run)
    data.mkdir()
    exp = replace(EXPERIMENT, run=replace(EXPERIMENT.run, dir=str(folder / f"new{name}")))
    calls = [lambda: ps.load(run), lambda: ps.resume(run), lambda: ps.evaluate(run, episodes=1), lambda: ps.train(exp)]
    calls += [lambda: ps.plot_runs([run], folder / "x.png"), lambda: open_dataset(data)]
    for call in calls:
        with pytest.raises(PenstockError, match=r"rename|choose another") as told:
            call()
        assert str(told.value).isprintable()
    assert not (folder / f"new{name}").exists()


def test_a_flipped_bit_in_the_settings_is_found(honest: Path, folder: Path) -> None:
    """Or it changes no setting: it lies in the layout of the text."""
    shutil.copytree(honest, folder / "run")
    file, draw = folder / "run" / "config.json", random.Random(0)
    sound, settings = file.read_bytes(), to_plain(read_config(folder / "run").to_resume())
    found = 0
    for _ in range(300):
        data = bytearray(sound)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        try:
            same = to_plain(read_config(folder / "run").to_resume()) == settings
        except PenstockError as error:
            assert str(file) in str(error)  # noqa: PT017
            found += 1
        else:
            assert same, data
    assert found > 200
    file.write_bytes(sound.replace(b'"seed": 2', b'"seed": 3'))
    with pytest.raises(PenstockError, match=r"config\.json is not as penstock wrote it.*--trust"):
        ps.load(folder / "run")
    assert read_config(folder / "run", trust=True).to_resume().run.seed == 3
    ps.load(folder / "run")  # by now it is on the list


def test_a_flipped_bit_in_the_index_of_a_dataset_is_found(folder: Path) -> None:
    path, draw = with_index(lambda index: None)(folder), random.Random(0)
    file = path / "dataset.json"
    sound, content = file.read_bytes(), json.loads(file.read_bytes())
    for _ in range(300):
        data = bytearray(sound)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        try:
            read_all(path)
        except PenstockError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            assert json.loads(data) == content
