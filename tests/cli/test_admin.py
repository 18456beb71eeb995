"""``psengine admin``, against servers with workers."""

import os
import socket
import tempfile

import pytest
import torch
from support.other_user import as_other_user, needs_root
from support.server_process import Peer, running_server

import psengine
from psengine.cli.main import main
from psengine.parameter_server.server.transport.authentication import keygen
from psengine.parameter_server.shared_secret import client_keys_of_secret
from psengine.protocol.frames import encode
from psengine.protocol.keys import CurveClientKeys
from psengine.protocol.messages import NOBODY, Message, MessageType

KEY_VARIABLES = ("SERVERS", "SECRET_FILE", "SERVER_KEY", "CLIENT_KEY")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in KEY_VARIABLES:
        monkeypatch.delenv(f"PSENGINE_{name}", raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("snapshots")
    with running_server(snapshot_dir=folder, snapshot_interval_s=0.0) as running:
        yield running


@pytest.fixture
def admin(capsys):
    """Exit code, and what was printed, of a command line."""

    def run(*words, server=None):
        address = server.addresses[0] if hasattr(server, "addresses") else server
        servers = [] if address is None else ["--server-address", address]
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["admin", *words, *servers])
        said = capsys.readouterr()
        return end.value.code or 0, said.out + said.err

    return run


def test_a_snapshot_an_eviction_and_the_end_of_a_job(server, admin):
    with Peer(server.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        assert admin("snapshot", server=server) == (0, f"{server.addresses[0]}: Durable to generation 1.\n")
        code, said = admin("evict", "--job", "job", "--worker", "7", server=server)
        assert (code, "job 'job' has no worker 7" in said) == (1, True), said
        code, said = admin("forget", "--job", "job", server=server)
        assert (code, "in use (expected no workers, got 1)" in said) == (1, True)
        assert admin("evict", "--job", "job", "--worker", "0", server=server)[0] == 0
        assert admin("forget", "--job", "job", server=server)[0] == 0
        assert "job" not in server.status()["jobs"]


def test_all_named_servers_are_told_and_one_may_not_know_the_worker(server, admin):
    with running_server() as other, Peer(server.addresses[0]) as peer:
        peer.job = "at-one"
        peer.make_job(torch.zeros(10))
        both = f"{server.addresses[0]},{other.addresses[0]}"
        code, said = admin("evict", "--job", "at-one", "--worker", "0", server=both)
        assert (code, said.count("\n")) == (0, 2)
        assert "has no worker 0" in said
        code, said = admin("snapshot", server=both)
        assert (code, "keeps no snapshots (expected a --snapshot-dir)" in said) == (1, True)


def order(address, curve, **body):
    """The answer to an order over TCP, so that the sender's user does not count."""
    with Peer(address, curve=curve, over_tcp=True) as peer:
        return peer.request("ADMIN", worker=NOBODY, body={"action": "drain", **body})


def test_a_worker_s_key_does_not_give_orders_and_an_operator_s_does(admin, tmp_path, monkeypatch):
    server_key, server_public = keygen(tmp_path / "server", "server")
    keys = {name: keygen(tmp_path / name, name)[0] for name in ("worker", "operator")}
    files = {"curve_key": server_key, "allow": tmp_path / "worker", "admin_allow": tmp_path / "operator"}
    with running_server(**files) as server:  # whose end waits for the lease
        pairs = {name: CurveClientKeys.load(key, server_public) for name, key in keys.items()}
        refused = order(server.addresses[0], pairs["worker"])
        assert (refused.body["code"], "--admin-allow" in refused.body["text"]) == ("not_allowed", True)
        assert server.status()["is_draining"] is False
        # A worker's other messages are taken.
        with Peer(server.addresses[0], curve=pairs["worker"]) as peer:
            assert peer.hello().type.name == "WELCOME"
        monkeypatch.setenv("PSENGINE_SERVER_KEY", str(server_public))
        monkeypatch.setenv("PSENGINE_CLIENT_KEY", str(keys["operator"]))
        assert order(server.addresses[0], pairs["operator"], action="evict").body["code"] == "bad_message"
        assert admin("evict", "--job", "job", "--worker", "0", server=server)[0] == 0
        assert order(server.addresses[0], pairs["operator"]).type.name == "OK"
        assert server.wait() == 0
        assert "ordered by the key" in server.log()


def test_the_workers_secret_does_not_give_orders(admin, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("a-random-word-of-some-length")
    with running_server(bind="tcp://0.0.0.0:0", secret_file=secret) as server:
        address = f"tcp://127.0.0.1:{server.addresses[0].rpartition(':')[2]}"
        assert order(address, client_keys_of_secret(secret)).body["code"] == "not_allowed"
        monkeypatch.setenv("PSENGINE_SECRET_FILE", str(secret))
        monkeypatch.setenv("PSENGINE_RUNTIME_DIR", str(tmp_path))  # the way of other users and hosts: TCP
        code, said = admin("drain", server=address)
        assert (code, "not_allowed" in said) == (1, True), said


def test_over_tcp_nobody_is_the_server_s_user_whatever_a_client_says():
    """A client may send any metadata of ZMTP, also under the names by which libzmq tells who it is."""
    said = {b"Socket-Type": b"DEALER", b"Peer-Address": b"localhost:0:0:1", b"User-Id": b"x"}
    with running_server(insecure=True) as open_to_all:
        host, _, port = open_to_all.addresses[0].removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
            assert peer.recv(64, socket.MSG_WAITALL)[:1] == b"\xff"
            said = (bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value for name, value in said.items())
            ready = b"\x05READY" + b"".join(said)
            peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
            assert b"READY" in peer.recv(43, socket.MSG_WAITALL)
            header, body = encode(Message(MessageType.ADMIN, body={"action": "drain"}))
            for flags, frame in ((1, header), (0, body)):
                peer.sendall(bytes([flags, len(frame)]) + bytes(frame))
            heard = b""
            while b"not_allowed" not in heard:
                part = peer.recv(4096)
                assert part, heard
                heard += part
        assert open_to_all.status()["is_draining"] is False
        # Its user, over the Unix socket, is obeyed by this server too.
        with Peer(open_to_all.addresses[0]) as own:
            assert own.request("ADMIN", worker=NOBODY, body={"action": "drain"}).type.name == "OK"


def drain_as_reader(address):
    with Peer(address) as peer:
        return peer.request("ADMIN", worker=NOBODY, body={"action": "drain"}).body["code"]


@needs_root
def test_another_user_of_the_machine_gives_no_orders():
    """This server lets every user in; over the Unix socket the kernel says which one it is."""
    with tempfile.TemporaryDirectory(prefix="psengine-open-") as folder:
        os.chmod(folder, 0o755)
        with running_server(bind=f"ipc://{folder}/socket", insecure=True) as server:
            os.chmod(f"{folder}/socket", 0o777)
            assert as_other_user(drain_as_reader, server.addresses[0]) == "not_allowed"
            assert server.status()["is_draining"] is False


def test_a_drained_server_keeps_its_workers_and_ends_with_the_last(admin, tmp_path):
    weights = {"w": torch.zeros(4)}
    with running_server(snapshot_dir=tmp_path / "s", snapshot_interval_s=0.0) as server:
        with psengine.connect(server.addresses[0], job="kept", rank=0) as client:
            client.register(weights, optimizer=torch.optim.SGD(list(weights.values()), lr=1.0))
            code, said = admin("drain", server=server)
            assert (code, "It ends when the last of 1 has left" in said) == (0, True)
            assert server.status()["is_draining"] is True
            # Others are not let in: neither to this job, nor to another.
            for job, rank in (("kept", 1), ("other", 0)):
                with Peer(server.addresses[0]) as peer:
                    peer.job = job
                    refused = peer.hello(rank=rank)
                    assert refused.body["code"] == "shutting_down"
                    assert "psengine admin drain" in refused.body["text"]
            # Its own worker goes on, and may come back.
            client.push_pull({"w": torch.ones(4)}, into=weights)
            assert weights["w"].tolist() == [-1.0] * 4
            code, said = admin("drain", "--wait-s", "1.5", server=server)
            assert (code, "still drains" in said) == (1, True)
            assert server.is_alive
        assert server.wait() == 0
        assert "shutting down: drained" in server.log()
    with (
        running_server(snapshot_dir=tmp_path / "s") as again,
        psengine.connect(again.addresses[0], job="kept", role="reader") as reader,
    ):
        assert reader.pull()["w"].tolist() == [-1.0] * 4


def test_shutdown_is_answered_and_ends_the_server(admin):
    with running_server() as server:
        code, said = admin("shutdown", server=server)
        assert (code, "it answers what is queued" in said) == (0, True)
        assert server.wait() == 0
