"""Open MPI's mpirun starts the workers: docs/launching/open_mpi.md's lines."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.holding import Hold
from support.hosts import Host, emulated_hosts, needs_hosts
from support.scheduled_runs import (
    DEADLINE_S,
    TRAINING,
    clean_environment,
    hosts_of,
    lines_of,
    lives_of,
    losses_of,
    native_losses,
    run,
)
from support.server_process import running_server
from support.waiting import eventually

# By its own name: pip's package mpich brings an mpirun too.
OPEN_MPI = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
pytestmark = pytest.mark.skipif(OPEN_MPI is None, reason="needs mpirun (Debian's package openmpi-bin)")

# It refuses root without the first, and more ranks than cores without the second.
MPIRUN = [OPEN_MPI, "--allow-run-as-root", "--oversubscribe"]
PYTHON = [sys.executable, str(TRAINING)]


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("strategy", ["sync", pytest.param("sync-server", marks=pytest.mark.slow)])
def test_two_ranks_have_native_ddps_bits(out, strategy):
    done = run([*MPIRUN, "-n", "2", *PYTHON, out], PSENGINE_STRATEGY=strategy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses_of(out) == native_losses(2)


@pytest.mark.slow
def test_the_death_of_a_rank_ends_all(out):
    command = [*MPIRUN, "-n", "2", *PYTHON, str(out), "--steps=10000", "--pause=0.05"]
    with subprocess.Popen(command, env=clean_environment(), stderr=subprocess.PIPE, text=True) as mpirun:
        try:
            eventually(lambda: len(lines_of(out)) == 2 and all(lines_of(out).values()), timeout_s=DEADLINE_S)
            os.kill(lines_of(out)[1][0]["pid"], 9)
            _, said = mpirun.communicate(timeout=60)
        finally:
            mpirun.kill()
    assert mpirun.returncode == 128 + 9
    assert "process rank 1" in said


@pytest.mark.slow
def test_independent_workers_outlive_each_other(out):
    script = (
        "exec psengine run --independent --workers 1 --first-worker $OMPI_COMM_WORLD_RANK"
        ' --total-workers 2 --max-restarts 3 --strategy async "$@"'
    )
    with running_server() as server:
        hold = Hold(out, 10)
        command = [*MPIRUN, "-n", "2", "--enable-recovery", "sh", "-c", script, "sh", str(TRAINING), str(out)]
        variables = clean_environment(PSENGINE_SERVERS=",".join(server.addresses))
        with subprocess.Popen([*command, "--steps=60", "--hold", hold.description], env=variables) as mpirun:
            try:
                eventually(lambda: len(lines_of(out)) == 2 and all(lines_of(out).values()), timeout_s=DEADLINE_S)
                os.kill(lines_of(out)[1][0]["pid"], 9)
                eventually(lambda: lives_of(out, 1) == 2, timeout_s=DEADLINE_S)
                hold.release()
                assert mpirun.wait(timeout=DEADLINE_S) == 0
            finally:
                mpirun.kill()
    lines = lines_of(out)
    assert [line["step"] for line in lines[0]] == list(range(60))
    assert len({line["pid"] for line in lines[1]}) == 2
    assert lines[1][-1]["step"] == 59


@contextmanager
def started_by_agent(host: Host, folder: Path) -> Iterator[list[str]]:
    """mpirun's options that let it start its daemon on ``host``: instead of sshd, a process there reads a pipe."""
    pipe, agent = folder / "pipe", folder / "agent"
    os.mkfifo(pipe)
    agent.write_text(f'#!/bin/sh\nshift\necho "$@" > {pipe}\nexec sleep 3600\n')
    agent.chmod(0o755)
    with host.start(["sh", "-c", f'sh -c "$(cat {pipe})"'], environment=clean_environment()):
        yield ["--mca", "plm_rsh_agent", str(agent), "--mca", "plm_rsh_no_tree_spawn", "1"]


@pytest.mark.slow
@needs_hosts
def test_several_hosts_meet_at_the_address_of_rank_0(out, tmp_path):
    with emulated_hosts(2, shared=[tmp_path]) as (one, two), started_by_agent(two, tmp_path) as agent:
        hosts = ["--host", "node-0,node-1", "-x", "PYTHONPATH", "-x", "MASTER_ADDR=node-0"]
        ended = one.run(
            [*MPIRUN, *agent, "-n", "2", *hosts, *PYTHON, out], environment=clean_environment(), deadline_s=DEADLINE_S
        )
    assert ended.code == 0, ended.stdout + ended.stderr
    assert losses_of(out) == native_losses(2)
    assert hosts_of(out) == ["node-0", "node-1"]
