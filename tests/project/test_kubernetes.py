"""deploy/kubernetes: the manifests are what the types of Kubernetes and Kubeflow take, and their commands run.

There is no cluster here. Commands run as processes of this machine, at paths of this test.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.holding import Hold
from support.processes import free_port
from support.scheduled_runs import DEADLINE_S, TRAINING, lines_of, lives_of
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
BASE, OVERLAYS, KUBEFLOW = (KUBERNETES / name for name in ("base", "overlays", "kubeflow"))
OVERLAY_NAMES = sorted(path.name for path in OVERLAYS.iterdir())
BUILT_IN = ("v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1")


def documents(text):
    yaml = pytest.importorskip("yaml", reason="yaml is not installed: pip install pyyaml")
    return [document for document in yaml.safe_load_all(text) if document]


def objects_of(folder):
    names = [path for path in sorted(folder.glob("*.yaml")) if path.name != "kustomization.yaml"]
    return [document for path in names for document in documents(path.read_text())]


@cache
def rendered(folder):
    """The objects of a kustomization."""
    for program in (["kustomize", "build"], ["kubectl", "kustomize"]):
        with contextlib.suppress(FileNotFoundError):
            done = subprocess.run([*program, folder], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            return documents(done.stdout)
    return pytest.skip("neither kustomize nor kubectl is installed")


def one(objects, kind, component=None):
    (found,) = (
        each
        for each in objects
        if each["kind"] == kind
        and component in (None, each["metadata"].get("labels", {}).get("app.kubernetes.io/component"))
    )
    return found


def container(workload, name):
    (found,) = (c for c in workload["spec"]["template"]["spec"]["containers"] if c["name"] == name)
    return found


def variables(found):
    return {entry["name"]: entry.get("value") for entry in found.get("env", [])}


@pytest.mark.slow  # the clients' imports alone take seconds
@pytest.mark.parametrize("name", ["base", *OVERLAY_NAMES])
def test_kubernetes_takes_the_objects(name):
    """Its own class reads an object and writes the same: no unknown field, no wrong type."""
    client = pytest.importorskip("kubernetes.client", reason="kubernetes is not installed: pip install kubernetes")
    objects = objects_of(BASE) if name == "base" else rendered(OVERLAYS / name)
    kinds = {"StatefulSet", "Service", "PodDisruptionBudget", "Job", "NetworkPolicy"}
    assert {each["kind"] for each in objects} == kinds
    for each in objects:
        assert each["apiVersion"] in BUILT_IN
        made = getattr(client, f"V1{each['kind']}").from_dict(each)
        assert client.ApiClient().sanitize_for_serialization(made) == each


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ClusterTrainingRuntime", "TrainJob"])
def test_kubeflow_takes_the_objects(name):
    reason = "kubeflow_trainer_api is not installed: pip install kubeflow-trainer-api"
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=reason)
    document = one(objects_of(KUBEFLOW), name)
    made = getattr(models, f"TrainerV1alpha1{name}").from_dict(document)
    assert json.loads(made.to_json()) == document


@pytest.mark.parametrize("name", ["base", *OVERLAY_NAMES])
def test_the_parts_of_a_training_fit(name):
    objects = rendered(KUBERNETES / "base" if name == "base" else OVERLAYS / name)
    servers, job, service = one(objects, "StatefulSet"), one(objects, "Job"), one(objects, "Service")
    worker, server = container(job, "worker"), container(servers, "server")
    assert [job["spec"]["completions"], job["spec"]["parallelism"]] == [int(variables(worker)["PSENGINE_WORKERS"])] * 2
    assert job["spec"]["completionMode"] == "Indexed"

    # The workers' addresses are those of the servers' pods.
    port = service["spec"]["ports"][0]["port"]
    names = [f"{servers['metadata']['name']}-{index}" for index in range(servers["spec"]["replicas"])]
    addresses = [f"tcp://{pod}.{service['metadata']['name']}:{port}" for pod in names]
    assert re.split("[,|]", variables(worker)["PSENGINE_SERVERS"]) == addresses
    assert f"--bind=tcp://0.0.0.0:{port}" in server["command"]
    assert servers["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"

    for workload, component in ((servers, "server"), (job, "worker")):
        pod = workload["spec"]["template"]
        labels = pod["metadata"]["labels"]
        assert pod["spec"]["enableServiceLinks"] is False
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        containers = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
        mounted = {mount["name"] for each in containers for mount in each.get("volumeMounts", [])}
        assert mounted == claims | {volume["name"] for volume in pod["spec"]["volumes"]}
        budget = one(objects, "PodDisruptionBudget", component)
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        selected = [
            policy
            for policy in (each for each in objects if each["kind"] == "NetworkPolicy")
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        ]
        assert len(selected) == 1, component
        if component == "server":
            (rule,) = selected[0]["spec"]["ingress"]
            allowed = rule["from"][0]["podSelector"]["matchLabels"]
            assert allowed.items() <= job["spec"]["template"]["metadata"]["labels"].items()
            assert rule["ports"][0]["port"] == port
            assert service["spec"]["selector"].items() <= labels.items()
            assert servers["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_a_train_job_fits_its_runtime():
    runtime, job = (one(objects_of(KUBEFLOW), kind) for kind in ("ClusterTrainingRuntime", "TrainJob"))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["spec"]["template"]["spec"]["enableServiceLinks"] is False
    # The names by which Kubeflow finds what a TrainJob changes.
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [c["name"] for c in node["template"]["spec"]["template"]["spec"]["containers"]] == ["node"]


class Pod:
    """The processes of a pod's containers, at this test's paths instead of the container's."""

    def __init__(self, workload, replaced, *, index=0):
        self._spec = workload["spec"]["template"]["spec"]
        self._replaced = replaced
        self._index = index

    def here(self, words):
        for old, new in self._replaced.items():
            words = [word.replace(old, new) for word in words]
        return words

    def environment(self, found):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HOME": os.environ.get("HOME", "/")}
        for entry in found.get("env", []):
            field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            assert field in (None, "metadata.annotations['batch.kubernetes.io/job-completion-index']")
            own[entry["name"]] = str(self._index) if field else self.here([entry["value"]])[0]
        return own

    def initialise(self):
        for found in self._spec["initContainers"]:
            subprocess.run(self.here(found["command"]), env=self.environment(found), check=True, timeout=60)

    def start(self, name, folder):
        (found,) = (c for c in self._spec["containers"] if c["name"] == name)
        command = self.here([*found["command"], *found.get("args", [])])
        with (folder / f"{name}-{self._index}.log").open("ab") as log:
            return found, subprocess.Popen(command, env=self.environment(found), cwd=folder, stdout=log, stderr=log)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["async", "sync-server"])
def test_the_containers_train_and_go_on_after_failures(tmp_path, strategy):
    objects = objects_of(BASE) if strategy == "async" else rendered(OVERLAYS / "sync-server")
    port, status_port = free_port(), free_port()
    for name in ("secret", "run", "state", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret" / "secret").write_text("a-secret-of-thirty-two-characters")
    (tmp_path / "secret" / "secret").chmod(0o440)
    out = tmp_path / "out"
    hold = Hold(tmp_path, 20, 400)
    arguments = [str(TRAINING), str(out), "--steps=800", "--hold", hold.description]
    program = f"import runpy, sys; sys.argv = {arguments}; runpy.run_path({str(TRAINING)!r}, run_name='__main__')"
    (tmp_path / "train.py").write_text(program)
    replaced = {
        "/secret/": f"{tmp_path}/secret/",
        "/run/psengine/": f"{tmp_path}/run/",
        "/var/lib/psengine/": f"{tmp_path}/state/",
        "psengine-server-0.psengine-servers": "127.0.0.1",
        ":7077": f":{port}",
        "9100": str(status_port),
    }
    servers, job = one(objects, "StatefulSet"), one(objects, "Job")
    assert variables(container(job, "worker"))["PSENGINE_STRATEGY"].partition(":")[0] == strategy
    server = Pod(servers, replaced)
    processes = []
    try:
        server.initialise()
        found, process = server.start("server", tmp_path)
        processes.append(process)

        def probe(name):
            command = server.here(found[name]["exec"]["command"])
            return subprocess.run(command, capture_output=True, timeout=DEADLINE_S).returncode == 0

        eventually(lambda: probe("startupProbe"), "the startup probe")
        workers = [Pod(job, replaced, index=index) for index in range(2)]
        running = []
        for pod in workers:
            pod.initialise()
            running.append(pod.start("worker", tmp_path)[1])
            processes.append(running[-1])
        eventually(lambda: all(map(lines_of(out).get, range(2))), "both workers train", timeout_s=DEADLINE_S)
        # A worker dies, and the Job starts another pod of its number.
        running[1].kill()
        running[1].wait(10)
        running[1] = workers[1].start("worker", tmp_path)[1]
        processes.append(running[1])
        # Under sync-server a newcomer gets the state of another worker between two steps.
        what = "wrapped" if strategy == "async" else "begins"
        eventually(lambda: lives_of(out, 1, what) == 2, "the worker's second life", timeout_s=DEADLINE_S)
        hold.release()
        eventually(lambda: len({line["pid"] for line in lines_of(out)[1]}) == 2, "its steps", timeout_s=DEADLINE_S)
        # The server's pod moves: it ends in order, and another takes its name and its claim.
        processes[0].send_signal(signal.SIGTERM)
        assert processes[0].wait(DEADLINE_S) == 0
        processes.append(server.start("server", tmp_path)[1])
        hold.release()
        codes = [process.wait(DEADLINE_S) for process in running]
        assert codes == [0, 0], (tmp_path / "worker-0.log").read_text() + (tmp_path / "worker-1.log").read_text()
        assert probe("livenessProbe")
        processes[-1].terminate()
        assert processes[-1].wait(DEADLINE_S) == 0
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(10)
    assert [lines_of(out)[worker][-1]["step"] for worker in range(2)] == [799, 799]
    assert (tmp_path / "run" / "secret").stat().st_mode & 0o777 == 0o600
