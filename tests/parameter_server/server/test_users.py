"""A machine that several users share: nobody reaches another's servers, and nobody is taken for another's server."""

import contextlib
import os
import shutil
import socket
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import zmq
from support.command_process import running_server_command
from support.other_user import OTHER_UID, as_other_user, needs_root, other_user
from support.server_process import Peer, running_server

import psengine
from psengine.environment import local_sockets
from psengine.environment.local_sockets import listener_uid, private_directory, socket_beside, way_to
from psengine.errors import AuthenticationError, ConfigurationError
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.server.transport.authentication import Authenticator

NUMEL = 1000


@pytest.fixture
def open_directory():
    """A directory that every user may enter."""
    directory = tempfile.mkdtemp(prefix="psengine-open-")
    os.chmod(directory, 0o777)
    yield Path(directory)
    shutil.rmtree(directory)


@contextmanager
def trained_model(address):
    """A worker's job with values 1, each of which a push lowers by what it holds; nobody else may touch it."""
    values = torch.ones(NUMEL)
    with psengine.connect(address, timeout_s=20) as client:
        client.register({"w": values}, optimizer=torch.optim.SGD([values], lr=1.0))
        yield client
        assert torch.equal(client.pull()["w"], torch.ones(NUMEL))


def read_model(address, **options):
    with psengine.connect(address, role="reader", timeout_s=20, **options) as client:
        return client.pull()["w"].tolist()


def answers_to_strangers(address):
    """Who asks past the client, which is polite: what HELLO, STATUS and a push into the job "default" bring."""
    with Peer(address) as peer:
        peer.job = "default"
        peer.socket.sndtimeo = 500  # without a connection nothing is taken
        answers = []
        with contextlib.suppress(zmq.Again):
            answers.append(peer.request("STATUS", worker=2**32 - 1, timeout_s=0.5))
            answers.append(peer.hello(rank=5))
            answers.append(peer.request("PUSH", key=0, payload=torch.full((NUMEL,), 1e6), timeout_s=0.5))
        return [answer.type.name for answer in answers if answer is not None]


@needs_root
def test_another_user_neither_reads_nor_writes_a_model():
    with running_server() as server, trained_model(address := server.addresses[0]):
        assert read_model(address) == [1.0] * NUMEL
        assert as_other_user(answers_to_strangers, address) == []
        started_s = time.monotonic()
        name, text = as_other_user(read_model, address)
        assert time.monotonic() < started_s + 25  # sooner than its deadline
        assert name == "AuthenticationError"
        assert text.startswith(f"{address} does not let this client in")
        assert "Fix: " in text


@needs_root
def test_who_listens_first_is_not_taken_for_this_users_server():
    with other_user(listen, "tcp://127.0.0.1:0") as receive:
        address = receive()
        with pytest.raises(AuthenticationError, match=rf"another user's.*got user {OTHER_UID}'s") as caught:
            read_model(address)
        assert str(caught.value).startswith(address)


def listen(address):
    """A ROUTER that lets everybody in and says nothing; yields its address, and waits."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(address)
    yield router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
    time.sleep(60)


def write_secret(path, text="x" * 40):
    path.write_text(text + "\n")
    path.chmod(0o600)
    return path


@needs_root
def test_another_user_with_the_secret_is_let_in(tmp_path, open_directory):
    secret = write_secret(tmp_path / "secret")
    theirs = write_secret(open_directory / "secret")
    os.chown(theirs, OTHER_UID, OTHER_UID)
    with running_server(secret_file=secret) as server, trained_model(server.addresses[0]):
        assert as_other_user(read_with_secret, server.addresses[0], str(theirs)) == [1.0] * NUMEL
        assert as_other_user(answers_to_strangers, server.addresses[0]) == []
        assert read_model(server.addresses[0]) == [1.0] * NUMEL


def read_with_secret(address, secret):
    os.environ["PSENGINE_SECRET_FILE"] = secret
    return read_model(address)


def test_a_wrong_secret_is_refused_soon_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PSENGINE_RUNTIME_DIR", str(tmp_path / "elsewhere"))  # no Unix socket is found there
    wrong = write_secret(tmp_path / "wrong", "y" * 40)
    right = write_secret(tmp_path / "secret")
    with running_server(secret_file=right, environment={"PSENGINE_RUNTIME_DIR": ""}) as server:
        monkeypatch.setenv("PSENGINE_SECRET_FILE", str(right))
        assert connected_status(server.addresses[0])
        for secret, error, words in (
            (
                str(wrong),
                AuthenticationError,
                rf"does not let this client in with the secret in {wrong}.*--secret-file",
            ),
            (
                str(tmp_path / "absent"),
                ConfigurationError,
                r"absent cannot be read \(expected a file that holds a secret",
            ),
            ("", AuthenticationError, "PSENGINE_SECRET_FILE"),
        ):
            monkeypatch.setenv("PSENGINE_SECRET_FILE", secret)
            started_s = time.monotonic()
            with pytest.raises(error, match=words):
                psengine.connect(server.addresses[0], role="reader", timeout_s=60)
            assert time.monotonic() < started_s + 20


@needs_root
def test_insecure_lets_every_user_in():
    with running_server(insecure=True) as server, trained_model(server.addresses[0]):
        assert as_other_user(read_model, server.addresses[0]) == [1.0] * NUMEL
        assert "every user of this machine" in server.log()


@pytest.fixture(scope="module")
def guard():
    with zmq.Context() as context:
        made = Authenticator(context, ServerSettings())
        yield made
        made._socket.close(0)


@pytest.mark.parametrize(
    ("address", "verdict"),
    [
        ("localhost:{me}:0:1", b"200"),
        ("localhost:{me}:0:", b"200"),
        ("localhost:65534:0:1", b"400"),
        ("localhost:{me}9:0:1", b"400"),
        ("localhost:", b"400"),
        ("", b"400"),
        ("localhost:-1:0:1", b"400"),
        ("xlocalhost:0:0:1", b"400"),
    ],
)
def test_who_may_come_in_without_keys(guard, address, verdict):
    peer = address.format(me=os.geteuid()).encode()
    for mechanism, expected in (
        ([b"NULL"], verdict),
        ([b"PLAIN", b"a", b"b"], b"400"),
        ([b"CURVE", b"k" * 32], b"400"),
    ):
        assert guard.judge([b"1.0", b"1", b"psengine", peer, b"", *mechanism])[2] == expected


def connected_status(address):
    with psengine.connect(address, role="reader", timeout_s=20) as client:
        return client.status()


def test_a_server_leaves_no_socket_behind_and_clears_up_after_those_that_were_killed(tmp_path, monkeypatch):
    # Short: pytest's own is too long for a socket's path.
    directory = Path(tempfile.mkdtemp(prefix="ps-"))
    monkeypatch.setenv("PSENGINE_RUNTIME_DIR", str(directory))
    try:
        with running_server(shards=2) as server:
            beside = {Path(socket_beside(address).removeprefix("ipc://")).name for address in server.addresses}
            assert {entry.name for entry in directory.iterdir()} == beside
            server.kill()
        assert {entry.name for entry in directory.iterdir()} == beside
        (directory / "notes").write_text("no socket")
        monkeypatch.setattr(local_sockets, "_STALE_S", -1.0)
        local_sockets.remove_stale_sockets()
        assert [entry.name for entry in directory.iterdir()] == ["notes"]
        with running_server() as server:
            local_sockets.remove_stale_sockets()
            assert len(connected_status(server.addresses[0])) == 1
            server.terminate()
            assert server.wait() == 0
        assert [entry.name for entry in directory.iterdir()] == ["notes"]
    finally:
        shutil.rmtree(directory)


def test_a_server_on_all_interfaces_has_one_socket_for_all_names_of_its_host():
    with running_server(bind="tcp://0.0.0.0:0", insecure=True) as server:
        port = server.addresses[0].rpartition(":")[2]
        for host in ("127.0.0.1", "localhost", socket.gethostname()):
            assert way_to(f"tcp://{host}:{port}") == socket_beside(f"tcp://0.0.0.0:{port}")
            assert len(connected_status(f"tcp://{host}:{port}")) == 1
        for elsewhere in (f"tcp://node.example:{port}", f"tcp://192.0.2.1:{port}", f"tcp://[2001:db8::1]:{port}"):
            assert way_to(elsewhere) == elsewhere


def test_a_server_that_can_make_no_socket_beside_all_interfaces_is_reached_by_tcp(tmp_path):
    (tmp_path / "file").touch()
    unusable = {"PSENGINE_RUNTIME_DIR": str(tmp_path / "file")}
    with running_server(bind="tcp://0.0.0.0:0", insecure=True, environment=unusable) as server:
        address = f"tcp://127.0.0.1:{server.addresses[0].rpartition(':')[2]}"
        assert way_to(address) == address
        assert len(connected_status(address)) == 1


@needs_root
@pytest.mark.parametrize("fault", ["owner", "mode", "link"])
def test_a_directory_that_is_not_ours_alone_is_refused(fault, tmp_path, monkeypatch):
    directory = tmp_path / "run"
    monkeypatch.setenv("PSENGINE_RUNTIME_DIR", str(directory))
    assert private_directory() == directory
    assert private_directory(make=True).stat().st_mode & 0o777 == 0o700
    if fault == "owner":
        os.chown(directory, OTHER_UID, 0)
    elif fault == "mode":
        directory.chmod(0o750)
    else:
        directory.rename(tmp_path / "aside")
        directory.symlink_to(tmp_path / "aside")
    with pytest.raises(ConfigurationError, match=r"must be ours alone.*Fix: .*PSENGINE_RUNTIME_DIR"):
        private_directory(make=True)
    with running_server_command(["--bind", "tcp://127.0.0.1:0"]) as command:
        assert command.wait() == 2
        assert "must be ours alone" in command.stderr


def test_who_listens_is_known_for_tcp_and_unix_sockets(tmp_path):
    me = os.geteuid()
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.create_server(("0.0.0.0", 0)) as anywhere:
        here, there = tcp.getsockname()[1], anywhere.getsockname()[1]
        for host, port, uid in (("127.0.0.1", here, me), ("localhost", here, me), ("127.0.0.1", there, me)):
            assert listener_uid(f"tcp://{host}:{port}") == uid
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
        assert listener_uid(f"tcp://[::1]:{six.getsockname()[1]}") == me
    assert listener_uid("tcp://192.0.2.1:7077") is None
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "s"))
        assert listener_uid(f"ipc://{tmp_path}/s") is None
        unix.listen()
        assert listener_uid(f"ipc://{tmp_path}/s") == me
