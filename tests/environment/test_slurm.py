"""deploy/slurm's own scripts, and docs/launching/slurm.md's lines, on a real Slurm cluster of three emulated nodes."""

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.holding import Hold
from support.hosts import ROOT
from support.process_table import is_running
from support.scheduled_runs import TRAINING, hosts_of, lines_of, lives_of, losses_of, native_losses
from support.slurm import Cluster, Job, needs_slurm, slurm_cluster, states_of

pytestmark = [pytest.mark.slow, needs_slurm, pytest.mark.timeout(400)]

SCRIPTS = ROOT / "deploy" / "slurm"
NODES = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(NODES, shared=[tmp_path_factory.getbasetemp()]) as started:
        yield started


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def submit(cluster: Cluster, out: Path, script: str, *training: str, **variables: str) -> Job:
    """deploy/slurm's ``script`` as it is: sbatch reads its resources."""
    return cluster.submit([SCRIPTS / script, TRAINING, out, *training], folder=out.parent, variables=variables)


def wrap(
    cluster: Cluster, out: Path, script: str, *training: str, options: Sequence[str] = (), **variables: str
) -> Job:
    """deploy/slurm's ``script`` with resources from the command line, and no GPUs."""
    words = " ".join(map(str, ["bash", SCRIPTS / script, TRAINING, out, *training]))
    resources = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--mem=64G", "--time=04:00:00"]
    return cluster.submit([*resources, *options, "--wrap", words], folder=out.parent, variables=variables)


def start_now(job: Job) -> None:
    """A requeued job waits two minutes: its former processes and credentials must be gone. Here the nodes say so."""
    job.wait_until(lambda: set(states_of(job.cluster)) <= {"idle", "planned"})
    update = ["scontrol", "update", f"jobid={job.number}"]
    job.cluster.run([*update, "StartTime=now+2"])  # credentials are told apart by the second

    def is_started() -> bool:
        job.cluster.run([*update, "Comment=look"])  # the backfill scheduler sleeps while nothing in the cluster changes
        return job.facts()["JobState"] != "PENDING"

    job.wait_until(is_started)


def steps_of(out: Path, worker: int) -> list[int]:
    return [line["step"] for line in lines_of(out).get(worker, [])]


def test_a_task_for_each_process(cluster, out):
    cluster.run(["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "python", TRAINING, out])
    assert losses_of(out) == native_losses(4)
    assert hosts_of(out) == ["node-1", "node-1", "node-2", "node-2"]


# What puts a job back into the queue: an operator, or the script itself after the signal before the time limit.
REQUEUES = {
    "an operator": (["scontrol", "requeue"], "0"),
    "the time limit's signal": (["scancel", "--signal=TERM"], "1"),
}


@pytest.mark.parametrize("how", REQUEUES)
def test_the_synchronous_script_goes_on_from_its_checkpoint(cluster, out, how):
    command, requeue = REQUEUES[how]
    hold = Hold(out, 30)
    training = ["--steps=40", "--hold", hold.description, "--checkpoint"]
    job = submit(cluster, out, "sync.sbatch", *training, WORKERS_PER_NODE="1", REQUEUE=requeue)
    job.wait_until(lambda: len(steps_of(out, 1)) >= 5)
    cluster.run([*command, str(job.number)])
    job.wait_until(lambda: job.facts()["JobState"] == "PENDING")
    before = steps_of(out, 0)
    hold.release()
    start_now(job)
    assert job.end() == "COMPLETED", job.text
    assert job.facts()["Restarts"] == "1"
    assert before[-1] < 39
    native = native_losses(2, 40)
    for worker, lines in lines_of(out).items():
        # A worker may have reported the interrupted step, which is not in the checkpoint.
        assert {line["step"]: line["loss"] for line in lines} == dict(enumerate(native[worker]))


@pytest.mark.parametrize("how", [submit, wrap], ids=["a heterogeneous job", "the server is the first step"])
def test_synchronous_training_over_a_server(cluster, out, how):
    job = how(cluster, out, "async.sbatch", WORKERS_PER_NODE="1", PSENGINE_STRATEGY="sync-server")
    assert job.end() == "COMPLETED", job.text
    assert losses_of(out) == native_losses(2)
    assert hosts_of(out) == (["node-2", "node-3"] if how is submit else ["node-1", "node-2"])
    assert os.stat(out.parent / f"psengine-{job.number}" / "keys" / "server.key").st_mode & 0o077 == 0


def test_a_killed_step_starts_again_and_the_other_workers_go_on(cluster, out):
    hold = Hold(out, 20)
    job = submit(cluster, out, "async.sbatch", "--steps=120", "--hold", hold.description, WORKERS_PER_NODE="1")
    job.wait_until(lambda: all(len(steps_of(out, worker)) >= 3 for worker in range(2)))
    # Slurm 22.05's scancel reports an error ("No error") after it has killed a heterogeneous job's step.
    cluster.run(["sh", "-c", f"scancel --signal=KILL {job.steps('psengine')['node-3']} || true"])
    job.wait_until(lambda: lives_of(out, 1) == 2)
    hold.release()
    assert job.end() == "COMPLETED", job.text
    assert "a step ended with exit code 137 (start 1 of 4)" in job.text
    survivor, killed = (lines_of(out)[worker] for worker in range(2))
    assert [line["step"] for line in survivor] == list(range(120))
    assert len({line["pid"] for line in survivor}) == 1
    first, again = (list(lines) for _, lines in itertools.groupby(killed, lambda line: line["pid"]))
    # It goes on where the servers' model is, under its number and on its node.
    assert again[0]["step"] >= first[-1]["step"]  # which may not have told the servers of its last one
    assert again[-1]["step"] == 119
    assert {line["host"] for line in killed} == {"node-3"}


@pytest.mark.parametrize("how", REQUEUES)
def test_a_requeued_job_goes_on_from_the_servers_snapshot(cluster, out, how):
    command, requeue = REQUEUES[how]
    hold = Hold(out, 40)
    training = ["--steps=60", "--hold", hold.description]
    job = submit(cluster, out, "async.sbatch", *training, WORKERS_PER_NODE="1", REQUEUE=requeue)
    job.wait_until(lambda: all(len(steps_of(out, worker)) >= 5 for worker in range(2)))
    cluster.run(["sh", "-c", f"{' '.join(command)} {job.number} || true"])
    job.wait_until(lambda: job.facts()["JobState"] == "PENDING")
    before = [steps_of(out, worker) for worker in range(2)]
    hold.release()
    start_now(job)
    assert job.end() == "COMPLETED", job.text
    assert job.facts()["Restarts"] == "1"
    assert re.search(r"durable to \S+, generation \d+ \(", job.text)
    last = [steps[-1] for steps in before]
    again = [steps_of(out, worker)[len(before[worker]) :] for worker in range(2)]
    assert max(last) < 59
    # The first worker that comes goes on from the server's last snapshot, which has all but the steps that were under
    # way; the second from where the first is by then.
    assert min(last) - 1 <= min(steps[0] for steps in again) <= max(last) + 2
    assert min(last) - 1 <= max(steps[0] for steps in again)
    assert [steps[-1] for steps in again] == [59, 59]


def test_a_failed_node_does_not_end_the_others(cluster, out):
    hold = Hold(out, 20)
    held = ["--steps=40", "--hold", hold.description]
    job = wrap(cluster, out, "async.sbatch", *held, options=["--no-kill"], WORKERS_PER_NODE="1")
    job.wait_until(lambda: all(len(steps_of(out, worker)) >= 3 for worker in range(2)))
    lost = lines_of(out)[1][-1]["pid"]
    cluster.run(["scontrol", "update", "nodename=node-2", "state=down", "reason=test"])
    try:
        job.wait_until(lambda: not is_running(lost))
        hold.release()
        job.end()
        assert steps_of(out, 0) == list(range(40))
        assert steps_of(out, 1)[-1] < 39
        assert "Node failure on node-2" in job.text
    finally:
        cluster.run(["scontrol", "update", "nodename=node-2", "state=idle"])
