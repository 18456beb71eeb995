"""The client against a scripted peer: losses, delays, repeats and nonsense, which a real server does not produce."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from support.scripted_peer import RULE, SPECS, Peer, T
from support.waiting import eventually

from psengine.errors import (
    AuthenticationError,
    ProtocolError,
    ServerError,
    ServerLostError,
    ServerRefusedError,
)
from psengine.parameter_server.client import connection, link, reachability
from psengine.parameter_server.client.channel import Channel
from psengine.parameter_server.client.operation import Parking
from psengine.parameter_server.client.stalls import StallWatch
from psengine.parameter_server.client.worker_session import Request, SessionOptions, WorkerSession, wait_all
from psengine.protocol.frames import encode
from psengine.protocol.messages import ErrorCode, Message


@contextlib.contextmanager
def connected(timeout_s=5.0, **options):
    peer = Peer()
    try:
        options = {"addresses": [peer.address], "rule": RULE, "rank": 0, "timeout_s": timeout_s, **options}
        with WorkerSession(SessionOptions(**options)) as session:
            session.enter(SPECS, lambda spec: torch.zeros(spec.numel))
            yield peer, session
    finally:
        peer.close()
    assert peer.error is None


def push(session, key=0, value=1.0):
    numel = SPECS[key].numel
    out = torch.zeros(numel)
    return session.push(key, torch.full((numel,), float(value)), [out]), out


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"payload": torch.zeros(3)}, "expected 64 of torch.float32, got 3 of torch.float32"),
        ({"payload": torch.zeros(128, dtype=torch.int16)}, "got 128 of torch.int16"),
    ],
)
def test_answers_that_do_not_fit_are_errors_and_write_nothing(fields, words):
    with connected() as (peer, session):
        peer.script[T.PUSH] = lambda peer, route, m: peer.reply(m, T.UPDATED, **fields)
        peer.script[T.PULL] = lambda peer, route, m: peer.reply(m, T.VALUES, **fields)
        pushed, out = push(session)
        for operation in (pushed, session.pull(0, [out])):
            with pytest.raises(ProtocolError, match=words):
                operation.wait()
        assert not out.any()
        del peer.script[T.PUSH]
        assert push(session)[0].wait().version == 2


@pytest.mark.parametrize(
    "nonsense",
    [
        [b"x" * 96],
        [b"a", b"b", b"c", b"d", b"e"],
        [encode(Message(T.OK))[0][:95] + b"\xff"],
        [encode(Message(T.UPDATED, sequence=1, key=0, payload=torch.zeros(4)))[0], b"short"],
    ],
)
def test_nonsense_harms_nobody(nonsense):
    with connected() as (peer, session):
        peer.script[T.PUSH] = lambda peer, route, m: [nonsense, nonsense, peer.answer(m)]
        for step in (1, 2):
            pushed, out = push(session)
            assert pushed.wait().version == step
            assert bool((out == 2).all())


def test_nothing_but_nonsense_is_an_error_that_says_so():
    with connected() as (peer, session):
        peer.script[T.PUSH] = lambda *_: [[b"y" * 96]]
        peer.script[T.WAITS] = lambda *_: [[b"y" * 96]]
        peer.script[T.HEARTBEAT] = lambda *_: None
        begun = time.monotonic()
        with pytest.raises(ProtocolError, match=r"does not speak this protocol.*no psengine message"):
            push(session)[0].wait()
        assert time.monotonic() - begun < 3


def test_what_is_refused_names_the_push_and_wakes_who_waits_for_something_slower():
    with connected() as (peer, session):
        body = {"code": "unknown_key", "text": "no such chunk"}
        peer.script[T.PUSH] = lambda peer, route, m: peer.reply(m, T.ERROR, body=body) if m.key == 0 else None
        peer.script[T.WAITS] = lambda peer, route, m: peer.reply(m, T.PENDING, body={"waiting_for": [1]})
        begun, words = time.monotonic(), r"push 1 of chunk 0 \(weight\) \(unknown_key\): no such"
        with pytest.raises(ServerRefusedError, match=words) as caught:
            wait_all([push(session, 0)[0], push(session, 1)[0]])
        assert caught.value.code == "unknown_key"
        assert time.monotonic() - begun < 2


def test_no_answer_until_the_deadline_names_everything():
    with connected(timeout_s=0.8) as (peer, session):
        peer.script[T.PUSH] = lambda *_: None
        first, second = push(session)[0], push(session)[0]
        with pytest.raises(ServerLostError) as caught:
            first.wait()
        for text in (peer.address, "push 1 of chunk 0 (weight)", "last heard from", "psengine-server", "timeout_s"):
            assert text in str(caught.value)
        with pytest.raises(ServerLostError, match="push 2"):
            second.wait()


def test_a_crash_of_the_thread_fails_every_waiter(monkeypatch, caplog):
    with connected() as (peer, session):
        peer.script[T.PUSH] = lambda *_: None
        waiting = push(session)[0]
        monkeypatch.setattr(session.job_connection, "tick", lambda now_s: 1 / 0)
        with pytest.raises(ServerError, match=r"I/O thread failed: ZeroDivisionError") as caught:
            waiting.wait()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(ServerError, match="ZeroDivisionError"):
            push(session)
    assert "ZeroDivisionError" in caplog.text


def test_a_peer_that_cuts_every_connection_off_is_no_server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def cut_off():
            listener.settimeout(0.1)
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    listener.accept()[0].close()

        thread = threading.Thread(target=cut_off)
        thread.start()
        try:
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(AuthenticationError, match="no psengine-server"):
                WorkerSession(SessionOptions(addresses=[address], rule=RULE, rank=0)).start()
        finally:
            stop.set()
            thread.join()


def test_a_peer_that_accepts_and_says_nothing_is_lost_not_hostile(monkeypatch):
    monkeypatch.setattr(connection, "HANDSHAKE_MS", 200)
    monkeypatch.setattr(reachability, "SLOW_CUT_S", 0.15)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServerLostError, match="never heard"):
            WorkerSession(SessionOptions(addresses=[address], rule=RULE, rank=0, connect_timeout_s=2.5)).start()


# ---- what takes long is said ---------------------------------------------------------------------------------------


def lines_of(caplog):
    return [
        record.getMessage() for record in caplog.records if record.name == "psengine.parameter_server.client.stalls"
    ]


def test_a_stall_is_one_line_however_many_chunks_and_one_when_it_ends(monkeypatch, caplog):
    monkeypatch.setenv("PSENGINE_STALL_S", "0.6")
    may_answer = threading.Event()

    def pending(peer, route, message):
        if may_answer.is_set():
            return peer.reply(message, T.UPDATED, version=1, payload=torch.ones(SPECS[message.key].numel))
        return peer.reply(message, T.PENDING, body={"waiting_for": [2, 5]})

    with connected() as (peer, session):
        peer.script[T.PUSH] = lambda peer, route, message: None
        peer.script[T.WAITS] = pending
        pushes = [push(session, key)[0] for key in range(len(SPECS))]
        eventually(lambda: lines_of(caplog), interval_s=0.01)
        may_answer.set()
        wait_all(pushes)
        eventually(lambda: "no longer" in lines_of(caplog)[-1])
        # Where this machine is slow the second report, after 1.2 s, lies between the two.
        begun, *_, ended = lines_of(caplog)
        what = f"for {peer.address}: push 1 of chunk 0 (weight)"
        assert begun.startswith("worker 0 of job 'default' has waited 0.")
        assert f"{what} (and 1 more)" in begun
        assert "waits for workers [2, 5]" in begun
        assert ended.startswith(f"worker 0 of job 'default' waits no longer {what}")


class TestStallsByAClockOfOurs:
    @pytest.fixture
    def link(self):
        return self.channel("tcp://a:1")

    def channel(self, address):
        job = SimpleNamespace(runtime=SimpleNamespace(now_s=lambda: 0.0))
        return Channel(job, address)

    def begin(self, link, now_s):
        request = Request(Message(T.PULL, key=0, sequence=1), Parking(lambda: now_s), 1e6, what="PULL of something")
        link.begin(request)
        return request

    def looked(self, watch, links, until_s, caplog):
        """The whole seconds at which a line came."""
        found = []
        for second in range(until_s + 1):
            before = len(lines_of(caplog))
            watch.look("worker 0", links, float(second))
            found += [second] * (len(lines_of(caplog)) - before)
        return found

    def test_lines_come_again_and_again_and_say_how_long_it_is_waited(self, link, caplog):
        self.begin(link, 0.0)
        assert self.looked(StallWatch(30.0), [link], 130, caplog) == [30, 60, 90, 120]
        assert "and gives up in 999970 s. The server was never heard from" in lines_of(caplog)[0]

    def test_two_servers_are_one_line(self, link, caplog):
        other = self.channel("tcp://b:2")
        self.begin(link, 3.0)
        self.begin(other, 1.0)
        assert self.looked(StallWatch(30.0), [link, other], 40, caplog) == [31]
        assert "tcp://b:2: PULL of something (and 1 more), and" in lines_of(caplog)[0]

    def test_a_second_stall_is_a_new_one(self, link, caplog):
        watch = StallWatch(10.0)
        self.begin(link, 0.0)
        watch.look("worker 0", [link], 10.0)
        link.receive_answer(Message(T.VALUES, key=0, sequence=1))
        watch.look("worker 0", [link], 13.0)
        self.begin(link, 14.0)
        watch.look("worker 0", [link], 20.0)
        watch.look("worker 0", [link], 25.0)
        assert [line.split(" ")[2:5] for line in lines_of(caplog)] == [
            ["has", "waited", "10.0"],
            ["waits", "no", "longer"],
            ["has", "waited", "11.0"],
        ]


# ---- connections that break ----------------------------------------------------------------------------------------


def test_a_new_connection_says_what_is_open_and_sends_again_what_is_missing():
    with connected() as (peer, session):
        peer.script[T.PUSH] = lambda *_: None
        lost, kept = push(session, 0)[0], push(session, 1)[0]
        eventually(lambda: peer.seen[T.PUSH] == 2)
        peer.script[T.RESUME] = lambda peer, route, m: [
            peer.reply(m, T.RESUMED, body=peer.resumed() | {"missing": [0]}),
            peer.reply(m, T.UPDATED, key=1, sequence=1, version=1, payload=torch.ones(SPECS[1].numel)),
        ]
        del peer.script[T.PUSH]
        link = session.job_connection.links[0]
        session.job_connection.transport.do(lambda: link.open(time.monotonic()))
        wait_all([lost, kept])
        said = [m.type for m in peer.messages if m.type in (T.VIEW, T.RESUME)]
        assert said[-2:] == [T.VIEW, T.RESUME]
        assert [m.body["open"] for m in peer.messages if m.type is T.RESUME][-1] == [[0, 1], [1, 1]]
        assert peer.seen[T.PUSH] == 3


def test_what_a_shard_refuses_as_fenced_is_asked_again_and_keeps_no_credit(monkeypatch):
    monkeypatch.setattr(link, "REQUESTED_BYTES", 300)
    with connected() as (peer, session):
        refusal = {"code": ErrorCode.FENCED, "text": "silent for more than its lease"}
        peer.script[T.STORE] = lambda peer, route, m: peer.reply(m, T.ERROR, body=refusal)
        stored = session.store(0, torch.ones(SPECS[0].numel))
        eventually(lambda: peer.seen[T.STORE] and not stored.is_sent)
        del peer.script[T.STORE]
        session.job_connection.transport.do(session.job_connection.links[0].send_requests)
        stored.wait()
        out = torch.zeros(SPECS[0].numel)
        session.pull(0, [out]).wait()
        assert out.all()


def test_waiting_longer_than_a_heartbeat_asks_whom_for_and_sends_nothing_again():
    with connected(timeout_s=1.5) as (peer, session):
        peer.script[T.PUSH] = lambda *_: None
        peer.script[T.WAITS] = lambda peer, route, m: peer.reply(m, T.PENDING, body={"waiting_for": [3]})
        with pytest.raises(ServerLostError, match=r"did not answer push 1 of chunk 0 .*waits for workers \[3\]"):
            push(session)[0].wait()
        assert peer.seen[T.PUSH] == 1
        assert peer.seen[T.WAITS] > 1
