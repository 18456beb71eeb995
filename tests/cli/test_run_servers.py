"""psengine run's parameter servers: started again where they die, given up where that does not help."""

import json
import os
import re
import shutil
import signal

import pytest
from support import marks
from support.command_process import WORKER, running_command, servers_of
from support.holding import Hold
from support.scheduled_runs import TRAINING, lines_of, losses_of, native_losses
from support.server_process import Peer
from support.waiting import eventually

from psengine.cli.launching.plan import SERVER_STRATEGIES, RunOptions
from psengine.cli.launching.servers import launched_servers
from psengine.parameter_server.client.embedded import launch
from psengine.parameter_server.server.replication.election import decode_leadership
from psengine.strategies.registry import STRATEGIES, resolve_strategy
from psengine.strategies.servers.base import ServerStrategy


def test_a_server_that_keeps_dying_ends_the_run():
    with running_command(["run", "--strategy", "async", WORKER, "hang"]) as command:
        seen: set[int] = set()

        def new_server() -> int | None:
            return next((pid for pid in servers_of(command.pid) if pid not in seen), None)

        command.wait_until(lambda: "worker 0 has" in command.stdout)
        for life in range(3):
            server = command.wait_until(new_server)
            command.wait_until(lambda life=life: command.stderr.count("is back") == life)
            seen.add(server)
            os.kill(server, signal.SIGKILL)
        assert command.wait() == 1
        assert "3 times in 120 s. It wrote last:" in command.stderr


def test_a_server_without_its_folder_is_given_up(tmp_path):
    folder = tmp_path / "snapshots"
    with running_command(["run", "--strategy", "async", "--snapshot-dir", str(folder), WORKER, "hang"]) as command:
        command.wait_until(lambda: "worker 0 has" in command.stdout)
        (server,) = servers_of(command.pid)
        os.kill(server, signal.SIGSTOP)  # it would make the folder anew
        shutil.rmtree(folder)
        folder.touch()
        os.kill(server, signal.SIGKILL)
        assert command.wait() == 1
        assert "--snapshot-dir is a folder for the servers to write in" in command.stderr
        assert "3 times in 120 s" in command.stderr


def process_of(member):
    with Peer(member.addresses[0]) as peer:
        return json.loads(bytes(peer.request("STATUS").payload))["server"]["pid"]


def in_sync(record, term):
    """Who leads under this term, with a follower that has all; None before."""
    found = decode_leadership(record.read_bytes(), "the record")
    return found if found.term == term and len(found.members) == 2 else None


@pytest.mark.parametrize("durability", ["log+replica", marks.slow("replica")])
def test_a_run_has_followers_that_lead_when_their_servers_stop_or_die(durability, tmp_path):
    record = tmp_path / "server-0-leadership"
    options = ["--server-option", f"durability={durability}", "--server-option", "lease_s=4"]
    line = ["run", "--strategy", "async", "--snapshot-dir", str(tmp_path), *options, WORKER, "hang"]
    with running_command(line) as command:
        command.wait_until(lambda: "worker 0 has" in command.stdout)
        first = in_sync(record, 1)
        assert f"PSENGINE_SERVERS={'|'.join(one.addresses[0] for one in first.members)}" in command.stdout
        os.kill(process_of(first.members[0]), signal.SIGSTOP)
        second = command.wait_until(lambda: in_sync(record, 2))
        assert f"{first.members[0].addresses[0]} is silent; it is killed, and its follower leads" in command.stderr
        assert second.members[0] == first.members[1]
        for member in second.members:
            os.kill(process_of(member), signal.SIGKILL)
        third = command.wait_until(lambda: in_sync(record, 3))
        assert third.members[0].addresses == second.members[0].addresses
        if durability == "replica":
            assert command.stderr.count("goes on from its last snapshot") == 1
        else:
            assert third.members[0].previous == second.members[0].epoch


@pytest.mark.slow
def test_a_server_and_its_follower_die_and_sync_server_has_the_undisturbed_bits(tmp_path):
    line = ["run", "--strategy", "sync-server", "--nproc-per-node=2", "--server-option", "durability=replica"]
    line += [str(TRAINING), str(tmp_path), "--steps", "20"]
    hold = Hold(tmp_path, 10)
    with running_command(line, environment=hold.environment) as command:
        command.wait_until(lambda: len(lines_of(tmp_path).get(0, ())) >= 5)
        for server in servers_of(command.pid):
            os.kill(server, signal.SIGKILL)
        hold.release()
        assert command.wait() == 0
        assert "goes on from its last snapshot" in command.stderr
    assert losses_of(tmp_path) == native_losses(2, 20)


def test_a_worker_that_stood_still_for_longer_than_its_lease_ends_and_is_started_again(tmp_path):
    """A new process takes over the others' state, and goes on at their step."""

    def steps_of(worker):
        return lines_of(tmp_path).get(worker, ())

    line = ["run", "--strategy", "sync-server", "--independent", "--workers", "2", "--max-restarts", "1"]
    line += [str(TRAINING), str(tmp_path), "--steps", "10000", "--pause", "0.1"]
    with running_command(line) as command:
        command.wait_until(lambda: len(steps_of(1)) >= 3)
        first, taken = steps_of(1)[-1]["pid"], len(steps_of(0))
        os.kill(first, signal.SIGSTOP)
        command.wait_until(lambda: len(steps_of(0)) >= taken + 5)
        os.kill(first, signal.SIGCONT)
        command.wait_until(lambda: steps_of(1)[-1]["pid"] != first)
        evicted = r"worker 1 failed: exit code 75 \(evicted: the others went on without it\)"
        why = r"without worker 1: silent for \d+\.\d s, longer than its lease; it is heard again after \d+.* Fix: "
        assert re.search(f"{evicted}\n(.*\n)*.*{why}start it again", command.stderr), command.stderr
        came = [line["pid"] for line in steps_of(1)].count(first)
        last, joined = (line["step"] for line in steps_of(1)[came - 1 : came + 1])
        assert joined > last + 1, "it takes no step of the others again"


def test_psengine_knows_its_strategies_over_servers_before_it_imports_torch():
    assert set(SERVER_STRATEGIES) == {name for name in STRATEGIES if isinstance(resolve_strategy(name), ServerStrategy)}


def test_a_server_launched_ahead_ends_where_the_run_is_refused():
    with launched_servers(RunOptions(strategy="async")) as launched:
        (server,) = launched
        eventually(lambda: servers_of(os.getpid()) == [server.pid], "the server's own command line")
        assert server.poll() is None
    assert server.returncode == -signal.SIGKILL
    assert servers_of(os.getpid()) == []


def test_a_server_launched_ahead_ends_with_its_launcher():
    server = launch()
    server.stdin.close()  # as the kernel does where the launcher is killed
    try:
        assert server.wait(60) == 0
        assert server.stdout.read() == ""
    finally:
        with server:
            server.kill()
