"""A server with CURVE keys while it runs: keys that are taken away, and a server that comes back with others."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

import pytest
import torch
import zmq
from support.server_process import running_server

import psengine
from psengine.parameter_server.client import reachability
from psengine.parameter_server.server.transport import authentication
from psengine.parameter_server.server.transport.authentication import (
    Authenticator,
    KeyList,
    KeyRing,
    keygen,
    new_key_pair,
    try_handshake,
)
from psengine.parameter_server.server.transport.endpoint import Endpoint
from psengine.protocol.keys import CurveClientKeys, read_key_pair


@pytest.fixture
def keys(tmp_path):
    """Two servers' keys, and those of a worker in a directory of allowed ones."""
    for server in ("server", "other"):
        keygen(tmp_path / "servers", server)
    client_key, _ = keygen(tmp_path / "allowed", "worker")
    return {
        "server": tmp_path / "servers" / "server.key",
        "other": tmp_path / "servers" / "other.key",
        "allow": tmp_path / "allowed",
        "client": CurveClientKeys.load(client_key, tmp_path / "servers" / "server.pub"),
    }


# ---- keys that are taken away ----------------------------------------------------------------------------------


@pytest.fixture
def door(keys, monkeypatch):
    """(what comes of a handshake with the worker's key, the same with a newcomer's) at a lock in this process."""
    monkeypatch.setattr(authentication, "RELOAD_S", 0.0)
    context = zmq.Context()
    guard = Authenticator(context, KeyRing(read_key_pair(keys["server"]), KeyList(keys["allow"])))
    guard.start()
    endpoint = Endpoint(context, "tcp://127.0.0.1:0", guard)
    yield lambda pair: try_handshake(context, endpoint.address, keys["client"].server_public, pair)
    endpoint.close(0)
    guard.end()
    context.destroy(linger=0)


def test_a_bad_file_does_not_keep_in_who_was_removed(door, keys, caplog):
    newcomer = new_key_pair()
    (keys["allow"] / "newcomer.pub").write_text(f"public {newcomer.public} newcomer\n")
    assert door(newcomer) == "accepted"
    (keys["allow"] / "bad.pub").write_text("rubbish\n")
    (keys["allow"] / "newcomer.pub").unlink()
    assert door(newcomer) == "refused"
    assert door(keys["client"].own) == "accepted"
    assert [record.getMessage() for record in caplog.records if "bad.pub" in record.getMessage()] == [
        f"keys that cannot be read are not allowed: {keys['allow']}/bad.pub, line 1, is not understood (expected"
        " 'public KEY NAME' or, in a .key file, 'secret KEY', where KEY is 40 characters of Z85)."
    ]


def test_without_its_directory_nobody_is_allowed(door, keys, caplog):
    assert door(keys["client"].own) == "accepted"
    aside = keys["allow"].with_name("aside")
    keys["allow"].rename(aside)
    assert door(keys["client"].own) == "refused"
    assert "nobody is let in any more (No such file or directory)" in caplog.text
    aside.rename(keys["allow"])
    assert door(keys["client"].own) == "accepted"


# ---- a server that comes back ----------------------------------------------------------------------------------


class Tunnel:
    """What stands before a server as ``ssh -L`` does: it takes every connection, and drops it while nobody listens."""

    def __init__(self, target):
        self.dropped = 0
        self._target = target.removeprefix("tcp://").rsplit(":", 1)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_stopping = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._is_stopping = True
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self):
        while not self._is_stopping:
            with contextlib.suppress(TimeoutError):
                front = self._listener.accept()[0]
                try:
                    back = socket.create_connection((self._target[0], int(self._target[1])))
                except ConnectionRefusedError:
                    front.close()
                    self.dropped += 1
                    continue
                self._threads.append(threading.Thread(target=self._carry, args=(front, back)))
                self._threads[-1].start()

    def _carry(self, front, back):
        with front, back, contextlib.suppress(ConnectionError):
            while not self._is_stopping:
                for source in select.select([front, back], [], [], 0.05)[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    (back if source is front else front).sendall(data)


@contextlib.contextmanager
def worker(address, keys):
    """A worker whose first exchange is over; what it does for another one."""
    weights, out = torch.zeros(8), torch.zeros(8)
    with psengine.connect(address, rank=0, keys=keys["client"], timeout_s=60.0) as client:
        client.register({"w": weights})

        def exchange():
            client.push_pull({"w": torch.ones(8)}, into={"w": out})
            return out.tolist()

        assert exchange() == [1.0] * 8
        yield exchange


def test_a_server_that_is_away_behind_a_tunnel_is_waited_for(keys):
    """The tunnel cuts handshakes as a server with other keys does."""
    options = {"allow": keys["allow"], "curve_key": keys["server"]}
    with (
        running_server(**options) as first,
        Tunnel(first.addresses[0]) as tunnel,
        worker(tunnel.address, keys) as exchange,
    ):
        first.kill()
        since_s = time.monotonic()
        while (
            tunnel.dropped < 3 * reachability.MAX_CUT_HANDSHAKES
            or time.monotonic() < since_s + 2 * reachability.CUT_HANDSHAKES_S
        ):
            time.sleep(0.02)
        with running_server(bind=first.addresses[0], **options):
            assert exchange() == [1.0] * 8
