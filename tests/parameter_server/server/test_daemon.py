"""Real processes and sockets: start-up, signals, snapshots, and peers that misbehave."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import time
import urllib.request

import pytest
import torch
import zmq
from support.command_process import running_server_command
from support.server_process import Peer, ServerFailedError, running_server
from support.shard_world import AVERAGE
from support.waiting import eventually

from psengine.environment.processes import SAME_STOP_S
from psengine.parameter_server.server.daemon import MAX_EVENTS, MAX_LINES, EventLog
from psengine.protocol.messages import NOBODY


def snapshot(peer):
    """What the operator is told, over the Unix socket."""
    return peer.request("ADMIN", body={"action": "snapshot"}).body["text"]


def get(url, timeout_s=60.0):
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return response.status, response.read().decode()


def test_ipc_paths_are_for_their_owner_and_are_not_taken_over(tmp_path):
    path = tmp_path / "socket"
    with running_server(bind=f"ipc://{path}", shards=2) as server:
        assert server.addresses == [f"ipc://{path}", f"ipc://{path}-1"]
        assert path.stat().st_mode & 0o077 == 0
        with (
            pytest.raises(ServerFailedError, match=r"exit code 3(.|\n)*another process listens"),
            running_server(bind=f"ipc://{path}"),
        ):
            pass
        with Peer(server.addresses[1]) as peer:
            assert peer.request("RESUME", worker=NOBODY).type.name == "RESUMED"
        server.kill()
    assert path.exists()  # left behind by the kill
    with running_server(bind=f"ipc://{path}") as server, Peer(server.addresses[0]) as peer:
        assert peer.hello().type.name == "WELCOME"
        assert "--snapshot-dir" in snapshot(peer)
    (tmp_path / "file").write_text("mine")
    words = r"exit code 3(.|\n)*expected nothing at that path.*, got a file\)"
    with pytest.raises(ServerFailedError, match=words), running_server(bind=f"ipc://{tmp_path}/file"):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_the_command_serves_until_sigterm():
    arguments = ["--bind", "tcp://127.0.0.1:0", "--log-format", "json", "--lease-s", "4"]
    with running_server_command(arguments, environment={"PSENGINE_SHARDS": "2"}) as command:
        eventually(lambda: "psengine-server ready" in command.stdout)
        addresses = command.stdout.splitlines()[-1].split()[2:]
        assert len(addresses) == len(set(addresses)) == 2
        assert all(re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d+", address) for address in addresses)
        with Peer(addresses[0]) as peer, Peer(addresses[1]) as other:
            assert [one.request("RESUME", worker=NOBODY).body["shards"] for one in (peer, other)] == [addresses] * 2
            assert peer.hello().body["lease_s"] == 4.0
            assert "the first shard of the job's first server" in other.hello().body["text"]
        entries = [json.loads(line) for line in command.stderr.splitlines()]
        assert any(entry["message"] == "durability memory: not durable, no --snapshot-dir" for entry in entries)
        assert set(entries[0]) == {"time", "level", "logger", "thread", "message"}
        assert any(entry["message"].startswith("psengine-server ready") for entry in entries)
        assert command.stdout.splitlines() == [f"psengine-server ready {' '.join(addresses)}"]
        command.signal(signal.SIGTERM)
        assert command.wait() == 0


@pytest.fixture(scope="module")
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--no-such-option"], 2, "No such option"),
        (["--bind", "tcp://0.0.0.0:0"], 2, "need keys"),
        (["--bind", "ipc:///absent/directory/socket"], 3, "could not be bound"),
        (["--bind", "tcp://127.0.0.1:{port}"], 3, "127.0.0.1:{port}"),
        (["--bind", "tcp://127.0.0.1:0", "--status-port", "{port}"], 3, "--status-port"),
        (["--bind", "tcp://127.0.0.1:0", "--snapshot-dir", "/absent/directory/below"], 4, "/absent/directory/below"),
        (["--bind", "tcp://127.0.0.1:0", "--snapshot-dir", "{link}/below"], 4, "expected {link} to lead to a folder"),
        (["--version"], 0, "psengine-server 0"),
    ],
)
def test_exit_codes(arguments, code, words, taken_port, tmp_path):
    given = {"port": taken_port, "link": tmp_path / "link"}
    given["link"].symlink_to("not-mounted")
    with running_server_command([argument.format(**given) for argument in arguments]) as command:
        assert command.wait() == code
        shown = command.stdout + command.stderr
        assert words.format(**given) in shown
        assert "Traceback" not in shown


def test_a_directory_has_one_server_at_a_time(tmp_path):
    with running_server(snapshot_dir=tmp_path) as server:
        words = rf"exit code 4(.|\n)*{tmp_path} to be free, got a lock held by process {server.pid}\)"
        with pytest.raises(ServerFailedError, match=words), running_server(snapshot_dir=tmp_path):
            pass
        server.kill()
    with running_server(snapshot_dir=tmp_path) as server:
        assert server.is_alive


def slow_commit():
    rename = os.rename

    def slow(source, target, **options):
        if str(target).endswith("generation-000000000002"):
            time.sleep(60)
        rename(source, target, **options)

    os.rename = slow


def test_the_second_signal_ends_at_once_and_leaves_a_valid_generation(tmp_path):
    directory = tmp_path / "s"
    with running_server(snapshot_dir=directory, snapshot_interval_s=0.0, sabotage=slow_commit) as server:
        with Peer(server.addresses[0]) as peer:
            peer.make_job(torch.zeros(1000))
            assert snapshot(peer) == "Durable to generation 1."
            assert peer.request("PUSH", key=0, sequence=1, payload=torch.ones(1000)).type.name == "UPDATED"
        server.signal(signal.SIGTERM)
        eventually((directory / "unfinished-generation-000000000002").exists)
        server.signal(signal.SIGTERM)  # the same stop
        time.sleep(SAME_STOP_S)
        assert server.is_alive
        server.signal(signal.SIGTERM)
        assert server.wait(20.0) == 128 + signal.SIGTERM  # the commit would take 60 s
        assert "ending at once; what came after the last complete snapshot is lost" in server.log()
    with running_server(snapshot_dir=directory, snapshot_interval_s=0.0) as server:
        assert server.lines[0].endswith("generation 1 (job version 0)")
        server.terminate()
        assert server.wait() == 0
    assert not list(directory.glob("unfinished-*"))


def test_an_embedded_server_ends_when_stdin_closes_and_nobody_is_left():
    reader, writer = os.pipe()
    with running_server(until_stdin_closes=True, stdin=reader, lease_s=60.0) as server:
        os.close(reader)
        with Peer(server.addresses[0]) as peer:
            peer.make_job(torch.zeros(10))
            server.signal(signal.SIGINT)  # Ctrl-C goes to the whole process group
            os.close(writer)
            time.sleep(0.5)
            assert server.is_alive
            peer.leave()
        assert server.wait() == 0


def test_an_embedded_server_does_not_wait_for_workers_that_wait_for_its_parent():
    """Only the parent would have given the job its values."""
    reader, writer = os.pipe()
    with running_server(until_stdin_closes=True, stdin=reader, lease_s=60.0) as server:
        os.close(reader)
        with Peer(server.addresses[0]) as peer:
            assert peer.hello(rank=1, world_size=2).body["state"] == "wait"
            os.close(writer)
            assert server.wait() == 0


def test_the_service_manager_is_told():
    name = f"@psengine-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:])
        manager.settimeout(10)
        with running_server(environment={"NOTIFY_SOCKET": name}) as server:
            assert [manager.recv(4096) for _ in range(3)] == [b"READY=1", *[b"WATCHDOG=1"] * 2]
            server.terminate()
            while (last := manager.recv(4096)) != b"STOPPING=1":
                assert last == b"WATCHDOG=1"
            assert server.wait() == 0


def test_health_status_and_metrics(tmp_path):
    with running_server(shards=2, snapshot_dir=tmp_path / "s", snapshot_interval_s=0.0) as server:
        with Peer(server.addresses[0]) as peer:
            peer.make_job(torch.zeros(10))
            assert peer.request("PUSH", key=0, sequence=1, payload=torch.ones(10)).type.name == "UPDATED"
            peer.send(peer.message("PUSH", key=0, sequence=1, payload=torch.ones(10)))  # a repeat
            assert peer.receive().type.name == "UPDATED"
            assert snapshot(peer) == "Durable to generation 1."
            assert get(f"{server.status_url}/healthz") == (200, "ok\n")
            status = server.status()
            assert (status["healthy"], status["addresses"]) == (True, server.addresses)
            assert [shard["index"] for shard in status["shards"]] == [0, 1]
            code, text = get(f"{server.status_url}/metrics")
        assert code == 200
        for line in (
            'psengine_applied_total{shard="0",training_job="job"} 1.0',
            'psengine_duplicates_total{shard="0",training_job="job"} 1.0',
            "psengine_snapshot_generation 1.0",
            "psengine_healthy 1.0",
        ):
            assert line in text, text


def test_bytes_that_are_no_zmq_cost_the_connection_only():
    with running_server() as server, Peer(server.addresses[0]) as peer:
        host, port = server.addresses[0].removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=60.0) as connection:
            connection.sendall(os.urandom(4096))
            assert peer.request("STATUS", worker=NOBODY).type.name == "STATUS_REPORT"
            with contextlib.suppress(ConnectionError):
                while connection.recv(100):  # our greeting; then the handshake's time is over
                    pass
        assert peer.request("STATUS", worker=NOBODY).type.name == "STATUS_REPORT"


def fail_on_status():
    from psengine.parameter_server.server.transport.shard_thread import ShardThread

    handle = ShardThread._handle

    def fail(self, sender, message):
        if message.type.name == "STATUS":
            raise RuntimeError("sabotage of STATUS")
        handle(self, sender, message)

    ShardThread._handle = fail


def test_a_failing_shard_says_so_and_serves_on():
    with running_server(sabotage=fail_on_status) as server, Peer(server.addresses[0]) as peer:
        for sequence in range(1, 20):
            answer = peer.request("STATUS", sequence=sequence)
            assert (answer.type.name, answer.body["code"], answer.sequence) == ("ERROR", "internal", sequence)
            assert "sabotage of STATUS" in answer.body["text"]
        assert peer.hello().type.name == "WELCOME"
        assert server.status()["shards"][0]["transport"]["failures"] == 19
        assert 1 <= server.log().count("Traceback") <= 3


def fail_in_the_socket():

    from psengine.parameter_server.server.transport.endpoint import Endpoint

    receive = Endpoint.receive

    def fail(self):
        if receive(self) is not None:
            raise zmq.ZMQError(zmq.ETERM)

    Endpoint.receive = fail


def test_a_dead_shard_ends_the_process():
    with running_server(sabotage=fail_in_the_socket, shards=2) as server, Peer(server.addresses[1]) as peer:
        assert peer.request("STATUS", timeout_s=0.5) is None
        assert server.wait() == 5
        assert "shard 1 failed; the server ends" in server.log()


def test_a_server_without_snapshots_says_so_loudly_of_jobs_whose_weights_it_has(tmp_path):
    loud = "when this process ends, the model of job 'job' is LOST"
    with running_server() as server:
        for job, rule in (("averaging", AVERAGE), ("job", None)):
            assert "NOTHING IS DURABLE" not in server.log()
            with Peer(server.addresses[0]) as peer:
                peer.job = job
                assert peer.hello(rule=rule).type.name == "WELCOME"
        eventually(lambda: loud in server.log())
        assert server.status()["durability"] == "memory"
    with running_server(snapshot_dir=tmp_path) as server, Peer(server.addresses[0]) as peer:
        assert peer.hello().type.name == "WELCOME"
        assert "NOTHING IS DURABLE" not in server.log()
        assert server.status()["durability"] == "snapshot"


def test_what_repeats_stays_once_and_is_counted():
    log = EventLog()
    log.note("evicted", "silent for 6.0 s, longer than its lease", job="a", worker=1)
    for generation in range(2, 2 + 3 * MAX_EVENTS):
        log.note("snapshot_failed", f"generation {generation} was not written: disk full")
        log.note("refused", "no", job="a", worker=1)
    log.note("refused", "no", job="a", worker=2)
    log.note("snapshot", "generation 700 is written")
    log.note("snapshot", "generation 701 is written")
    assert [(event.kind, event.worker, event.text) for event in log.events()] == [
        ("evicted", 1, "silent for 6.0 s, longer than its lease"),
        ("snapshot_failed", None, f"generation {3 * MAX_EVENTS + 1} was not written: disk full; 599 like it before"),
        ("refused", 1, "no; 599 like it before"),
        ("refused", 2, "no"),
        ("snapshot", None, "generation 701 is written"),
    ]


def test_the_list_and_the_lines_are_bounded(caplog):
    log = EventLog()
    for rank in range(MAX_EVENTS + 50):
        log.note("evicted", "silent", job="a", worker=rank)
    assert len(log.events()) == MAX_EVENTS
    assert log.events()[-1].worker == MAX_EVENTS + 49
    assert len(caplog.records) == MAX_LINES
    assert caplog.records[0].getMessage() == "job 'a': silent"


def leave_few_descriptors():
    most = len(os.listdir("/proc/self/fd")) + 150
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def test_more_clients_than_descriptors_are_turned_away_and_the_server_goes_on():
    """libzmq aborts where a connection over a Unix socket finds no descriptor."""
    with running_server(sabotage=leave_few_descriptors) as server, contextlib.ExitStack() as clients:
        for _ in range(60):
            clients.enter_context(Peer(server.addresses[0]))
        eventually(lambda: server.status()["shards"][0]["transport"]["turned_away"])
        assert server.status()["connection_limit"] < 150
        eventually(lambda: "connections are turned away: process" in server.log())
        clients.close()
        eventually(lambda: server.status()["shards"][0]["transport"]["connections"] == 0)
        with Peer(server.addresses[0]) as peer:
            assert peer.hello().type.name == "WELCOME"
