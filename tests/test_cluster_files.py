"""The files of examples/cluster: what they say to Kubernetes, Ray, SLURM and penstock is understood there."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from penstock.samplers.cpu import CpuSampler
from penstock.samplers.runners.settings import RunnerSampler

yaml: Any = pytest.importorskip("yaml", reason="PyYAML comes with Ray: pip install 'penstock[ray]'")
jsonschema: Any = pytest.importorskip("jsonschema", reason="jsonschema comes with Ray: pip install 'penstock[ray]'")

FOLDER = Path(__file__).parent.parent / "examples" / "cluster"
TEXT, COUNT, FLAG, ANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}, True
TEXTS = {"type": "object", "additionalProperties": TEXT}


def table(required: str = "", **fields: Any) -> dict[str, Any]:
    """An object with these fields and no others, as `kubectl` demands by default."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def listed(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^[0-9.]+(m|[KMGT]i?)?$"}}
CONTAINER = table(
    "name image",
    name={"type": "string", "pattern": "^[a-z0-9-]+$"},
    image=TEXT,
    env=listed(table("name", name=TEXT, value=TEXT)),
    resources=table(requests=QUANTITIES, limits=QUANTITIES),
    volumeMounts=listed(table("name mountPath", name=TEXT, mountPath=TEXT)),
)
POD = table(
    "spec",
    metadata=table(labels=TEXTS),
    spec=table(
        "containers",
        automountServiceAccountToken=FLAG,
        containers=listed(CONTAINER),
        volumes=listed(table("name", name=TEXT, persistentVolumeClaim=table("claimName", claimName=TEXT))),
    ),
)
WORKERS = table(
    "groupName maxReplicas minReplicas template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=POD,
)
RAY_JOB = table(  # of ray.io_rayjobs.yaml, KubeRay 1.7.0, the fields that are used here
    "rayClusterSpec entrypoint",
    entrypoint=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    shutdownAfterJobFinishes=FLAG,
    backoffLimit=COUNT,
    rayClusterSpec=table(
        "headGroupSpec rayVersion",  # of a cluster with tokens the operator wants its version
        rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        authOptions=table("mode", mode={"const": "token"}),
        headGroupSpec=table("template", rayStartParams=TEXTS, template=POD),
        workerGroupSpecs=listed(WORKERS),
    ),
)
SELECTOR = table(matchLabels=TEXTS)
PEER = table(podSelector=SELECTOR, namespaceSelector=SELECTOR)
POLICY = table(
    "podSelector",
    podSelector=SELECTOR,
    policyTypes={"type": "array", "items": {"enum": ["Ingress", "Egress"]}},
    ingress=listed({**table(), "properties": {"from": listed(PEER), "ports": listed(table(port=COUNT))}}),
)
CLAIM = table(
    accessModes=listed({"enum": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"]}),
    resources=table(requests=QUANTITIES),
)
KINDS = {
    ("ray.io/v1", "RayJob"): RAY_JOB,
    ("networking.k8s.io/v1", "NetworkPolicy"): POLICY,
    ("v1", "PersistentVolumeClaim"): CLAIM,
}


def manifests() -> dict[str, Any]:
    return {x["kind"]: x for x in yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text())}


def faults(manifest: dict[str, Any]) -> list[str]:
    """The complaints of the schema about a manifest."""
    spec = KINDS[manifest["apiVersion"], manifest["kind"]]
    name = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
    whole = table(
        "apiVersion kind metadata spec", apiVersion=ANY, kind=ANY, metadata=table("name", name=name), spec=spec
    )
    return [
        f"{list(e.absolute_path)}: {e.message}" for e in jsonschema.Draft202012Validator(whole).iter_errors(manifest)
    ]


def commands(text: str, **variables: str) -> list[list[str]]:
    """The words after `penstock` of every command line in a text, with its shell variables replaced."""
    text = re.sub(r"^# ?", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    for name, value in variables.items():
        text = text.replace(f'"${name}"', value)
    found: list[list[str]] = []
    for match in re.finditer(r"\bpenstock ((?:train|resume) [^\n;&\"']*)", text):
        found.append(shlex.split(match[1], comments=True))
    return found


def experiment(argv: list[str]) -> Any:
    """The experiment of a command line, as `penstock train` reads it; a wrong option ends the test."""
    from penstock.cli.settings import experiment, train_parser

    args, rest = train_parser().parse_known_args(argv[2:])
    return experiment(argv[1], args, rest)[0]


def kuberay_entrypoint() -> list[list[str]]:
    return commands(manifests()["RayJob"]["spec"]["entrypoint"])


def slurm() -> tuple[str, dict[str, str]]:
    text = (FOLDER / "slurm.sh").read_text()
    nodes = re.search(r"--nodes=(\d+)", text)
    cpus, run = re.search(r"^per_runner=(\d+)", text, re.MULTILINE), re.search(r"^run=(\S+)", text, re.MULTILINE)
    assert nodes and cpus and run
    return text, {"SLURM_JOB_NUM_NODES": nodes[1], "per_runner": cpus[1], "run": run[1]}


def ray_up() -> tuple[str, dict[str, Any]]:
    text = (FOLDER / "ray-up.yaml").read_text()
    return text, yaml.safe_load(text)


def test_the_manifests_are_what_kubernetes_and_kuberay_take() -> None:
    found = manifests()
    assert set(found) == {kind for _, kind in KINDS}
    assert {name: faults(x) for name, x in found.items()} == {name: [] for name in found}


@pytest.mark.parametrize(
    "broken",
    [
        lambda spec: spec["rayClusterSpec"].pop("headGroupSpec"),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].pop("groupName"),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].update(replicaz=3),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"].pop("containers"),
        lambda spec: spec.update(backoffLimit="3"),
    ],
)
def test_the_schema_sees_what_kubernetes_would_refuse(broken: Any) -> None:
    job = manifests()["RayJob"]
    broken(job["spec"])
    assert faults(job)


def test_the_pods_are_those_that_the_policy_protects_and_the_claim_exists() -> None:
    found = manifests()
    cluster = found["RayJob"]["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    labels = found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert [pod["metadata"]["labels"] for pod in pods] == [labels] * len(pods)
    assert found["NetworkPolicy"]["spec"]["ingress"][0] == {"from": [{"podSelector": {"matchLabels": labels}}]}
    assert len({container["image"] for pod in pods for container in pod["spec"]["containers"]}) == 1
    volumes = pods[0]["spec"]["volumes"]
    assert volumes[0]["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
    mounts = {m["mountPath"] for m in pods[0]["spec"]["containers"][0]["volumeMounts"]}
    env = {e["name"]: e["value"] for e in pods[0]["spec"]["containers"][0]["env"]}
    assert env["PENSTOCK_TRUST"] in mounts


def test_the_cluster_of_ray_up_is_what_ray_takes() -> None:
    util: Any = importlib.import_module("ray.autoscaler._private.util")
    config = util.prepare_config(ray_up()[1])
    util.validate_config(config)
    with pytest.raises(jsonschema.ValidationError):
        util.validate_config({**config, "worker_ips": []})


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_scripts_are_what_bash_takes(tmp_path: Path) -> None:
    entrypoint = shlex.split(manifests()["RayJob"]["spec"]["entrypoint"])
    assert entrypoint[:2] == ["bash", "-c"]
    assert len(entrypoint) == 3
    (tmp_path / "entrypoint.sh").write_text(entrypoint[2])
    _, cluster = ray_up()
    lines = [x for key, found in cluster.items() if key.endswith("_commands") for x in found]
    (tmp_path / "ray-up.sh").write_text("\n".join(lines))
    for path in (FOLDER / "slurm.sh", tmp_path / "entrypoint.sh", tmp_path / "ray-up.sh"):
        done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stderr) == (0, ""), path.name


def test_the_commands_of_the_page_are_understood() -> None:
    found = [x for x in commands((FOLDER.parents[1] / "docs" / "cluster.md").read_text()) if "..." not in x]
    trained = [experiment(argv).sampler_settings for argv in found if argv[0] == "train"]
    assert len(trained) >= 6
    assert all(isinstance(sampler, RunnerSampler) for sampler in trained)
    known = {"--sampler", *(f"--sampler.{f.name.replace('_', '-')}" for f in fields(RunnerSampler))}
    changed = {word for argv in found if argv[0] == "resume" for word in argv[2:] if word.startswith("--")}
    assert changed == {*{"--sampler", "--sampler.runners", "--sampler.address"} & known, "--algo.replay.shards"}


def check(argv: list[str], nodes: int, cpus: int) -> RunnerSampler:
    """The sampler of a command, whose runners fit on nodes of so many CPUs."""
    sampler = experiment(argv).sampler_settings
    assert isinstance(sampler, RunnerSampler)
    assert isinstance(sampler.inner, CpuSampler)
    assert sampler.address == "auto"
    assert sampler.inner.workers <= sampler.num_cpus
    assert sampler.runners <= nodes * (cpus // sampler.num_cpus)
    return sampler


def test_the_commands_for_kuberay_are_understood_and_fit_its_pods() -> None:
    resume, train = sorted(kuberay_entrypoint())
    group = manifests()["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    sampler = check(train, group["minReplicas"], int(group["rayStartParams"]["num-cpus"]))
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["cpu"]) >= sampler.num_cpus
    assert resume == ["resume", str(experiment(train).run.dir)]


def test_the_commands_for_slurm_are_understood_and_fit_its_nodes() -> None:
    text, values = slurm()
    resume, train = sorted(commands(text, **values))
    per_task = re.search(r"--cpus-per-task=(\d+)", text)
    assert per_task
    check(train, int(values["SLURM_JOB_NUM_NODES"]), int(values["per_runner"]))
    assert int(values["per_runner"]) < int(per_task[1]), "the learner has no CPU"
    assert resume == ["resume", str(experiment(train).run.dir)]


def test_the_command_for_ray_up_is_understood_and_fits_its_machines() -> None:
    text, cluster = ray_up()
    (train,) = commands(text)
    cpus = re.search(r"--num-cpus=(\d+)", cluster["worker_start_ray_commands"][-1])
    assert cpus
    check(train, len(cluster["provider"]["worker_ips"]), int(cpus[1]))


def test_the_pictures_are_those_that_their_script_draws() -> None:
    images = FOLDER.parents[1] / "docs" / "images"
    script: Any = runpy.run_path(str(images / "runners.py"))
    assert (images / "runners.svg").read_text() == script["flow"]()
    assert (images / "runners-time.svg").read_text() == script["times"]()
