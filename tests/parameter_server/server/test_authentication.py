import os
import socket
import stat
import time
from urllib.parse import urlsplit

import pytest
import torch
import zmq
from support.command_process import running_server_command
from support.server_process import Peer, running_server
from support.worker_sessions import entered
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from psengine.errors import AuthenticationError, ConfigurationError
from psengine.parameter_server.client import reachability
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.server.transport import authentication
from psengine.parameter_server.server.transport.authentication import (
    ZAP_DOMAIN,
    Authenticator,
    keygen,
    new_key_pair,
)
from psengine.parameter_server.server.transport.endpoint import Endpoint
from psengine.protocol.keys import CurveClientKeys, read_allowed, read_key_pair


@pytest.fixture
def keys(tmp_path):
    """A server's key, a directory of allowed clients with one in it, and that client's and a stranger's keys."""
    server_key, server_public = keygen(tmp_path / "server", "server")
    client_key, _ = keygen(tmp_path / "clients", "worker")
    stranger_key, _ = keygen(tmp_path / "elsewhere", "stranger")
    return {
        "options": {"curve_key": server_key, "allow": tmp_path / "clients"},
        "client": CurveClientKeys.load(client_key, server_public),
        "stranger": CurveClientKeys.load(stranger_key, server_public),
    }


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def authenticator(keys, context):
    thread = Authenticator(context, ServerSettings(**keys["options"]))
    thread.start()
    yield thread
    thread.end()


def handshake(context, endpoint, keys, who):
    """What a client meets: "accepted", "refused" by the authenticator, or "cut" without its answer."""
    verdicts = {zmq.EVENT_HANDSHAKE_SUCCEEDED: "accepted", zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused"}
    cuts = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RECONNECT_IVL, 1 << 30)
    if who is not None:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, keys["client"].server_public.encode())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys[who].own.public.encode())
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys[who].own.secret.encode())
    with dealer, dealer.get_monitor_socket(sum(verdicts) | cuts) as events:
        dealer.connect(endpoint.address)
        assert events.poll(10_000)
        verdict = verdicts.get(recv_monitor_message(events)["event"], "cut")
        dealer.disable_monitor()
    return verdict


def test_keygen_writes_a_secret_for_its_owner_and_a_public_key(tmp_path):
    keys, command_line = tmp_path / "keys", ["keygen", str(tmp_path / "keys"), "--name", "server"]
    with running_server_command(command_line) as command:
        assert command.wait() == 0
        assert "keep secret" in command.stdout
    assert stat.S_IMODE((keys / "server.key").stat().st_mode) == 0o600
    pair = read_key_pair(keys / "server.key")
    assert read_allowed(keys / "server.pub") == {pair.public}
    assert zmq.curve_public(pair.secret.encode()).decode() == pair.public
    assert pair.secret not in repr(pair) + (keys / "server.pub").read_text()
    with running_server_command(command_line) as command:
        assert command.wait() == 2
        assert "never overwritten" in command.stderr
    with pytest.raises(ConfigurationError, match="file name"):
        keygen(tmp_path, "../me")


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_secret_that_others_could_read_is_refused(tmp_path, mode):
    path, _ = keygen(tmp_path, "me")
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=rf"mode 0600, got owner \d+ and mode {mode:04o}.*chmod 600"):
        read_key_pair(path)
    path.chmod(0o400)
    read_key_pair(path)
    if os.geteuid() == 0:  # only root can give files away
        os.chown(path, 12345, 12345)
        with pytest.raises(ConfigurationError, match="expected owner 0 and mode 0600, got owner 12345"):
            read_key_pair(path)


@pytest.mark.parametrize("text", ["", "public\n", "secret x\n", "public {p} a\n", "public {p}\nsecret {p}\nextra 1\n"])
def test_what_is_no_key_pair_is_refused(tmp_path, text):
    path = tmp_path / "me.key"
    path.write_text(text.format(p=new_key_pair().public))
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"not understood|no key pair"):
        read_key_pair(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_key_pair(tmp_path / "absent.key")
    with pytest.raises(ConfigurationError, match=r"no key file|cannot be read"):
        read_key_pair(tmp_path)


def test_allowed_keys_come_from_a_directory_or_a_file(tmp_path):
    secret, first = keygen(tmp_path, "first")
    _, second = keygen(tmp_path, "second")
    expected = read_allowed(first) | read_allowed(second)
    assert read_allowed(tmp_path) == expected
    together = tmp_path / "all"
    together.write_text("# everybody\n" + first.read_text() + "\n" + second.read_text())
    assert read_allowed(together) == expected
    with pytest.raises(ConfigurationError, match="one public key"):
        CurveClientKeys.load(secret, together)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_allowed(tmp_path / "absent")
    (tmp_path / "third.pub").write_text("nonsense")
    with pytest.raises(ConfigurationError, match=r"third\.pub, line 1"):
        read_allowed(tmp_path)


def test_a_dead_authenticator_lets_nobody_in(authenticator, context, keys):
    endpoint = Endpoint(context, "tcp://127.0.0.1:0", authenticator)
    authenticator.end()
    assert not authenticator.is_alive()
    for who in ("client", "stranger", None):
        assert handshake(context, endpoint, keys, who) == "cut"
    endpoint.close(0)


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, b"2.0"), (2, b""), (2, b"other"), (5, b"NULL"), (5, b"PLAIN"), (6, b"short"), (6, b"x" * 32)],
)
def test_the_authenticator_judges_strictly(authenticator, keys, place, value):
    key = z85.decode(keys["client"].own.public.encode())
    request = [b"1.0", b"1", ZAP_DOMAIN.encode(), b"127.0.0.1", b"", b"CURVE", key]
    assert authenticator.judge(request) == [b"1.0", b"1", b"200", b"OK", keys["client"].own.public.encode(), b""]
    request[place] = value
    assert authenticator.judge(request)[2] == b"400"
    assert authenticator.judge([*request, b"more"])[2] == b"400"


def test_a_bad_file_does_not_keep_in_who_was_removed(authenticator, context, keys, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(authentication, "RELOAD_S", 0.0)
    endpoint = Endpoint(context, "tcp://127.0.0.1:0", authenticator)
    allow = tmp_path / "clients"
    (allow / "stranger.pub").write_text((tmp_path / "elsewhere" / "stranger.pub").read_text())
    assert handshake(context, endpoint, keys, "stranger") == "accepted"
    (allow / "bad.pub").write_text("rubbish\n")
    (allow / "stranger.pub").unlink()
    assert handshake(context, endpoint, keys, "stranger") == "refused"
    assert handshake(context, endpoint, keys, "client") == "accepted"
    [said] = [record.getMessage() for record in caplog.records if "bad.pub" in record.getMessage()]
    assert said.startswith(f"keys that cannot be read are not allowed: {allow}/bad.pub, line 1, is not understood")
    allow.rename(aside := tmp_path / "aside")
    assert handshake(context, endpoint, keys, "client") == "refused"
    assert "No such file or directory" in caplog.text
    aside.rename(allow)
    assert handshake(context, endpoint, keys, "client") == "accepted"
    endpoint.close(0)


def test_a_server_with_keys_serves_its_clients_and_others_learn_why_not(keys):
    def received():
        return sum(shard["transport"]["received_messages"] for shard in server.status()["shards"])

    with running_server(shards=2, **keys["options"]) as server:
        assert "CURVE: 1 keys allowed; nobody else" in server.lines
        with entered(server.addresses[0], 0, keys=keys["client"]) as session:
            session.push(0, torch.ones(4), [torch.zeros(4)]).wait()
        before = received()
        for curve, reason in (
            (keys["stranger"], "does not know this client's public key"),
            (CurveClientKeys(keys["client"].own, new_key_pair().public), "server's public key is not the one"),
            (None, "expects CURVE keys"),
        ):
            begun_s = time.monotonic()
            with pytest.raises(AuthenticationError, match=reason):
                entered(server.addresses[0], 0, keys=curve)
            assert time.monotonic() < begun_s + 15  # far from the deadline
            for address in server.addresses:
                with Peer(address, curve=curve) as peer:
                    assert try_to_speak(peer) is None
        assert server.status()["refused_connections"] >= 2
        assert keys["stranger"].own.public in server.log()
        assert received() == before


def try_to_speak(peer):
    peer.send(peer.message("STATUS", worker=2**32 - 1))
    return peer.receive(0.3)


def failing_authenticator():
    def fail(self, request):
        raise RuntimeError("sabotage")

    Authenticator.judge = fail


def test_a_server_whose_authenticator_fails_ends(keys):
    with running_server(sabotage=failing_authenticator, **keys["options"]) as server:
        with Peer(server.addresses[0], curve=keys["stranger"]) as peer:
            assert try_to_speak(peer) is None
        assert server.wait() == 5
        assert "the authenticator failed" in server.log()


def test_a_server_that_is_away_behind_a_tunnel_is_waited_for(keys, tmp_path):
    """The tunnel takes connections and cuts them, as a server with other keys does."""
    options, ones, out = keys["options"], torch.ones(4), torch.zeros(4)
    options["environment"] = {"PSENGINE_RUNTIME_DIR": str(tmp_path)}  # its client finds no Unix socket
    with (
        running_server(**options) as first,
        entered(first.addresses[0], 0, keys=keys["client"], timeout_s=60.0) as session,
    ):
        session.push(0, ones, [out]).wait()
        first.kill()
        place = urlsplit(first.addresses[0])
        with socket.create_server((place.hostname, place.port)) as tunnel:
            tunnel.settimeout(20.0)
            end_s, cuts = time.monotonic() + 2 * reachability.CUT_HANDSHAKES_S, 0
            while time.monotonic() < end_s or cuts <= reachability.MAX_CUT_HANDSHAKES:
                tunnel.accept()[0].close()
                cuts += 1
        with running_server(bind=first.addresses[0], **options):
            session.push(0, 2 * ones, [out]).wait()
            assert out.tolist() == [2.0] * 4
