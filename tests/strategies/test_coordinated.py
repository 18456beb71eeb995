"""Independent workers with virtual workers: processes are killed, and the weights are those of the undisturbed run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import elastic_training, wide_training
from support.command_process import (
    run_command,
    running_command,
)
from support.elastic_training import await_another, process_of, weights_in
from support.expectations import raises
from support.holding import Hold
from support.process_table import listeners_of
from support.server_process import running_server
from support.waiting import eventually

from psengine.environment.processes import share_of_cores
from psengine.errors import CollectiveError, PSEngineError, ServerError
from psengine.parameter_server.client import elastic
from psengine.parameter_server.client.connection import PROCESS
from psengine.parameter_server.client.elastic import ElasticClient, elastic_rule
from psengine.parameter_server.client.flow import run
from psengine.parameter_server.client.join import greet
from psengine.parameter_server.client.options import SessionOptions
from psengine.protocol.views import View, ViewMember, message_of
from psengine.strategies.elastic import coordinated
from psengine.strategies.elastic.coordinated import CoordinatedMembership
from psengine.strategies.elastic.meeting import Meeting

SCRIPT = elastic_training.__file__
INDEPENDENT = ("--independent", "--strategy", "sync:virtual_workers=4")


@cache
def undisturbed() -> str:
    """The digest of a training by one worker, without a coordinator."""
    arguments = ["run", "--workers", "1", SCRIPT, "0"]
    code, stdout, stderr = run_command(arguments, environment={"OMP_NUM_THREADS": "1"})
    assert code == 0, stderr
    (digest,) = weights_in(stdout)
    return digest


def test_whoever_dies_the_weights_are_those_of_the_undisturbed_run(tmp_path):
    arguments = ["run", "--workers", "3", *INDEPENDENT, "--server-option", "lease_s=2", SCRIPT, "0.02"]
    hold = Hold(tmp_path, 40)
    with running_command(arguments, environment=hold.environment) as command:
        first, second, _ = (process_of(command, worker, 5) for worker in range(3))
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGSTOP)
        command.wait_until(lambda: re.search(r"worker 2 step 1[0-9]", command.stdout))
        os.kill(second, signal.SIGCONT)
        # It exits, and another process joins in its place.
        command.wait_until(lambda: "went on without worker 1" in command.stderr)
        await_another(command, 0, first)
        await_another(command, 1, second)
        hold.release()
        assert command.wait() == 0, command.stderr
        assert weights_in(command.stdout) == {undisturbed()}


def test_when_all_die_at_once_training_goes_on_from_a_checkpoint(tmp_path):
    arguments = ["run", "--workers", "2", *INDEPENDENT, SCRIPT, "0.02"]
    hold = Hold(tmp_path, 40)
    with running_command(arguments, environment={"TEST_CHECKPOINTS": str(tmp_path), **hold.environment}) as command:
        # A thread writes it, while steps go on.
        command.wait_until(lambda: list(tmp_path.glob("checkpoint-*.safetensors")))
        processes = {process_of(command, worker, 9) for worker in (0, 1)}
        for process in processes:
            os.kill(process, signal.SIGKILL)
        hold.release()
        assert command.wait() == 0, command.stderr
        said = re.findall(r"process (\d+) worker \d step (\d+)", command.stdout)
        assert min(int(step) for process, step in said if int(process) not in processes) > 1
        assert weights_in(command.stdout) == {undisturbed()}


def trained(directory: Path, *start: str, threads: int | None = None) -> tuple[set[tuple[str, str]], str]:
    """(digest and threads of each worker, stderr) of a training from the oldest checkpoint in ``directory`` on."""
    for newer in sorted(directory.glob("checkpoint-*"))[1:]:
        newer.unlink()
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, *start, wide_training.__file__, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"weights (\w+) threads (\d+)", done.stdout)), done.stderr


@pytest.mark.timeout(400)
def test_bits_depend_neither_on_the_number_of_workers_nor_on_the_launcher(tmp_path):
    run, fair = ("-m", "psengine.cli.main", "run", "--workers"), share_of_cores(4)
    three, _ = trained(tmp_path, *run, "3", *INDEPENDENT)
    assert [threads for _, threads in three] == [str(fair)]
    resumed, stderr = trained(tmp_path, *run, "1", *INDEPENDENT)
    assert resumed == three
    assert "another threads" not in stderr
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert trained(tmp_path / "torchrun", *torchrun)[0] == three
    assert trained(tmp_path / "run", *run, "1")[0] == three


def test_a_job_goes_on_with_the_threads_of_its_checkpoint(tmp_path):
    """Unless OMP_NUM_THREADS says otherwise; the log says so."""
    fair = share_of_cores(4)
    other = fair + 1
    first, _ = trained(tmp_path, threads=other)
    assert [threads for _, threads in first] == [str(other)]
    resumed, stderr = trained(tmp_path)
    assert resumed == first
    assert "another threads" not in stderr
    changed, stderr = trained(tmp_path, threads=fair)
    assert [threads for _, threads in changed] == [str(fair)]
    assert f"another threads, so this job's next steps differ (expected {other}, got {fair})" in stderr


def test_who_differs_is_refused_once_and_the_others_go_on(tmp_path):
    arguments = ["run", "--workers", "2", *INDEPENDENT, "--server-option", "lease_s=2", SCRIPT, "0.02"]
    hold = Hold(tmp_path, 5)
    with running_command(arguments, environment={"TEST_SEED": "4", **hold.environment}) as command:
        command.wait_until(lambda: "is not started again" in command.stderr)
        hold.release()
        assert command.wait() == 1
        assert len(re.findall(r"worker \d failed", command.stderr)) == 1
        assert "ConfigurationError: " in command.stderr
        assert "is not started again: the same program would fail so again; 1 others go on" in command.stderr
        assert len(re.findall(r"weights (\w+)", command.stdout)) == 1


def test_a_server_with_keys_has_one_port(tmp_path):
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a-secret-of-at-least-sixteen-characters\n")
    with running_server(bind="tcp://0.0.0.0:0", secret_file=str(secret), status_port=None) as server:
        port = int(server.addresses[0].rpartition(":")[2])
        address = f"tcp://127.0.0.1:{port}"
        arguments = ["run", "--workers", "2", *INDEPENDENT, "--server-address", address, SCRIPT, "0.02"]
        with running_command(arguments, environment={"PSENGINE_SECRET_FILE": str(secret)}) as command:
            for worker in (0, 1):
                process_of(command, worker, 5)
            assert {port for _, port in listeners_of(server.pid)} == {port}
            assert command.wait() == 0, command.stderr
            assert weights_in(command.stdout) == {undisturbed()}


def test_groups_that_fail_without_end_are_an_error_with_the_last_words(monkeypatch, caplog):
    caplog.set_level("WARNING")
    with running_server() as server:
        monkeypatch.setenv("PSENGINE_SERVERS", server.addresses[0])
        monkeypatch.setenv("PSENGINE_WORKER", "0")
        membership = CoordinatedMembership(1)
        membership.enter({}, 0)
        try:
            for completed in (0, 0, 1):
                membership.regroup(completed, CollectiveError("a server is gone"))
                membership._failed_s -= 0 if completed else 200  # as if it had taken so long
            assert sum("is gone" in message for message in caplog.messages) == 2, "a warning for each step"
            membership._failed_s -= 300
            with pytest.raises(ServerError, match="got: server 2 is gone"):
                membership.regroup(1, CollectiveError("server 2 is gone"))
        finally:
            membership.close()


def test_who_did_not_come_to_the_group_is_named(monkeypatch):
    """Worker 1 answers the coordinator, and never comes to where the workers meet."""
    monkeypatch.setattr(coordinated, "FORM_S", 2.0)
    monkeypatch.setattr(coordinated, "SessionOptions", partial(SessionOptions, timeout_s=6.0))
    with absent_worker(monkeypatch):
        membership = CoordinatedMembership(2)
        try:
            with raises(
                ServerError, "not connected to all others: worker 0 on", "listens at", "worker 1 on", "not come"
            ):
                membership.enter({}, 0)
        finally:
            membership.close()


def test_a_key_that_is_refused_ends_the_next_wait():
    """Though nobody waits where it is set."""
    with running_server() as server:
        options = SessionOptions(addresses=server.addresses, rule=elastic_rule(1, {}), rank=0, world_size=1)
        job = ElasticClient(options, PROCESS)
        try:
            run(greet(job), job.closing)
            view = run(elastic.regroup(job, 0), job.closing)
            meeting = Meeting(job, view.number, job.runtime.now_s() + 60.0)
            for value in (b"first", b"another"):
                meeting.set("key", value)
            with raises(ServerError, "'key' of a group is set already"):
                meeting.get("one that nobody sets")
        finally:
            job.closing.set()
            job.transport.close()


def test_a_worker_shows_its_view_only_once_it_has_the_state_of_its_group():
    runtime = SimpleNamespace(now_s=lambda: 0.0, connect=lambda _: None, process_table=lambda: "")
    job = ElasticClient(SessionOptions(addresses=["tcp://a:1"], rule=elastic_rule(1, {})), runtime)
    job.identity.worker, job.identity.incarnation = 0, 5
    for number, completed in ((1, None), (2, 0)):
        view = View(number, 7, (ViewMember(0, 5, "", 1),), ())
        job.receive_view(message_of(view, bytes(32), job.identity.job), 0.0)
        assert not job.has_ended(number)
        job.completed = completed
        assert ("view" in job.hello(0.0)) is (completed is not None)
        assert job.has_ended(number) is (completed is None)  # it takes part in the group of no view that it left out


def test_a_worker_that_is_interrupted_while_others_do_not_come_ends_in_order(monkeypatch):
    """gloo waits in our store, in C++: a thread that comes back from there as the interpreter ends aborts it."""
    program = f"from {coordinated.__name__} import CoordinatedMembership; CoordinatedMembership(2).enter({{}}, 0)"
    with absent_worker(monkeypatch) as absent:
        with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
            eventually(lambda: any("gloo" in key for key in absent.met))
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=120.0)
        assert "KeyboardInterrupt" in stderr
        assert process.returncode == -signal.SIGINT, stderr


@contextmanager
def absent_worker(monkeypatch) -> Iterator[ElasticClient]:
    """A server, and worker 1 of 2: it answers the coordinator, and forms no group."""
    with running_server() as server, ThreadPoolExecutor() as pool:
        monkeypatch.setenv("PSENGINE_SERVERS", server.addresses[0])
        monkeypatch.setenv("PSENGINE_WORKER", "0")
        monkeypatch.setenv("PSENGINE_WORKERS", "2")
        rule = elastic_rule(2, {})
        absent = ElasticClient(SessionOptions(addresses=server.addresses, rule=rule, rank=1, world_size=2), PROCESS)

        def answer() -> None:
            with suppress(PSEngineError):  # its end
                run(greet(absent), absent.closing)
                while True:
                    run(elastic.regroup(absent, absent.view_number), absent.closing)

        answering = pool.submit(answer)
        try:
            yield absent
        finally:
            absent.closing.set()
            absent.transport.close()
            answering.result()
