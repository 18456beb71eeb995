"""The client against a scripted peer: losses, delays, repeats and nonsense, which a real server does not produce."""

import contextlib
import re
import threading
import time
from dataclasses import replace

import pytest
import torch
import zmq
from support.scripted_peer import INCARNATION, KEY, SPECS, Peer, T, stranger
from support.shard_world import APPLY, AVERAGE, MERGE, SGD
from support.waiting import eventually

from psengine.errors import (
    AuthenticationError,
    ConfigurationError,
    ProtocolError,
    ServerError,
    ServerLostError,
    ServerRefusedError,
)
from psengine.parameter_server import sockets
from psengine.parameter_server.client import link, reachability
from psengine.parameter_server.client.worker_session import SessionOptions, WorkerSession, wait_all
from psengine.protocol.frames import encode
from psengine.protocol.messages import Message
from psengine.protocol.views import View, ViewMember, message_of


@contextlib.contextmanager
def connected(timeout_s=20.0, **options):
    peer = Peer()
    try:
        options = {"addresses": [peer.address], "rule": APPLY, "rank": 0, "timeout_s": timeout_s, **options}
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
    with connected(timeout_s=30.0) as (peer, session):
        peer.script[T.PUSH] = lambda *_: [[b"y" * 96]]
        peer.script[T.WAITS] = lambda *_: [[b"y" * 96]]
        peer.script[T.HEARTBEAT] = lambda *_: None
        begun = time.monotonic()
        with pytest.raises(ProtocolError, match=r"does not speak this protocol.*no psengine message"):
            push(session)[0].wait()
        assert time.monotonic() < begun + 20


def test_what_is_refused_names_the_push_and_wakes_who_waits_for_something_slower():
    with connected(timeout_s=30.0) as (peer, session):
        body = {"code": "unknown_key", "text": "no such chunk"}
        peer.script[T.PUSH] = lambda peer, route, m: peer.reply(m, T.ERROR, body=body) if m.key == 0 else None
        peer.script[T.WAITS] = lambda peer, route, m: peer.reply(m, T.PENDING, body={"waiting_for": [1]})
        begun, words = time.monotonic(), r"push 1 of chunk 0 \(weight\) \(unknown_key\): no such"
        with pytest.raises(ServerRefusedError, match=words) as caught:
            wait_all([push(session, 0)[0], push(session, 1)[0]])
        assert caught.value.code == "unknown_key"
        assert time.monotonic() < begun + 20


def test_a_store_waits_until_a_shard_that_lost_its_chunks_within_one_life_has_them_again():
    def store(peer, route, message):
        if peer.seen[T.REGISTER] == len(SPECS):
            return peer.reply(message, T.OK)
        code = "not_member" if peer.seen[T.RESUME] == greetings else "unknown_key"
        return peer.reply(message, T.ERROR, body={"code": code, "text": "another registration took their place"})

    with connected(rule=AVERAGE) as (peer, session):
        greetings, before, peer.script[T.STORE] = peer.seen[T.RESUME], peer.resumed(), store
        peer.resumed = lambda: {**before, "chunks": peer.seen[T.REGISTER]}
        session.store(0, torch.ones(SPECS[0].numel)).wait()


def test_a_shard_that_lost_a_merge_hears_that_what_it_answered_does_not_come_again():
    def answer(peer, route, message):
        if message.payload is None:
            renounced.append((message.key, message.sequence))
        return peer.answer(message) if (message.key == 0) == (peer.epoch == 1) and message.payload is not None else None

    def view(peer, route, message):
        return message_of(View(2, 1, (ViewMember(0, INCARNATION, "", 1),), (2,)), KEY, message.job)

    renounced = []
    with connected(rule=MERGE) as (peer, session):
        before, peer.script[T.PUSH] = peer.resumed(), answer
        pushes = [push(session, key)[0] for key in (0, 1)]
        pushes[0].wait()
        peer.epoch, peer.script[T.HEARTBEAT] = 2, view
        peer.resumed = lambda: {**before, "view": 2, "view_epoch": 1, "missing": [1]}
        pushes[1].wait()
        eventually(lambda: renounced)
    assert set(renounced) == {(0, 1)}


def test_a_request_that_carries_nothing_waits_for_no_credit(monkeypatch):
    monkeypatch.setattr(link, "REQUESTED_BYTES", 1)
    with connected() as (peer, session):
        peer.script[T.PULL] = lambda *_: None
        session.pull(0)
        session.configure(0, {"optimizer": "SGD", "groups": [SGD], "runs": [[0, 64, 0]]}).wait()


def test_no_answer_until_the_deadline_names_everything():
    with connected() as (peer, session):
        session.job_connection.options = replace(session.options, timeout_s=0.8)
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
    with stranger(b"") as address, pytest.raises(AuthenticationError, match="no psengine-server"):
        WorkerSession(SessionOptions(addresses=[address], rule=APPLY, rank=0)).start()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: x/1\r\n\r\n", r"a web server .* got 'HTTP/1\.1 400 .*', 'Server: x/1'"),
        (b"\r\n\r\n", "another program answers there"),
    ],
)
def test_another_program_at_the_address_is_named_at_once(answer, words):
    begun_s = time.monotonic()
    with stranger(answer) as address, pytest.raises(ConfigurationError, match=words):
        WorkerSession(SessionOptions(addresses=[address], rule=APPLY, rank=0)).start()
    assert time.monotonic() < begun_s + SessionOptions.connect_timeout_s


def test_a_peer_that_says_nothing_may_be_a_server_that_is_stopped(monkeypatch, caplog):
    monkeypatch.setattr(sockets, "HANDSHAKE_MS", 200)
    monkeypatch.setattr(reachability, "SLOW_CUT_S", 0.15)
    with stranger() as address, pytest.raises(ServerLostError, match=r"never heard.*stopped, or another program"):
        WorkerSession(SessionOptions(addresses=[address], rule=APPLY, rank=0, connect_timeout_s=8.0)).start()
    assert f"{address} does not answer: a program listens there that says nothing" in caplog.text


def test_another_zeromq_program_is_named(monkeypatch, caplog):
    monkeypatch.setattr(reachability, "SILENCE_S", 0.1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        address = f"tcp://127.0.0.1:{other.bind_to_random_port('tcp://127.0.0.1')}"
        with pytest.raises(ServerLostError, match="a ZeroMQ program listens there"):
            WorkerSession(SessionOptions(addresses=[address], rule=APPLY, rank=0, connect_timeout_s=4.0)).start()


def lines_of(caplog):
    return [
        record.getMessage() for record in caplog.records if record.name == "psengine.parameter_server.client.stalls"
    ]


def test_a_stall_is_one_line_however_many_chunks_again_and_again_and_one_when_it_ends(monkeypatch, caplog):
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
        eventually(lambda: len(lines_of(caplog)) > 1, interval_s=0.01)
        may_answer.set()
        wait_all(pushes)
        eventually(lambda: "no longer" in lines_of(caplog)[-1])
        begun, again, *_, ended = lines_of(caplog)
        what = f"for {peer.address}: push 1 of chunk 0 (weight)"
        assert begun.startswith("worker 0 of job 'default' has waited ")
        first_s, second_s = (float(re.search(r"waited (\S+) s", line)[1]) for line in (begun, again))
        assert second_s >= first_s + 0.5 > 1.0
        assert f"{what} (and 1 more)" in begun
        assert "waits for workers [2, 5]" in begun
        assert re.search(r" and gives up in \d+ s", again), again
        assert ended.startswith(f"worker 0 of job 'default' waits no longer {what}")


def test_a_late_pull_says_that_the_server_waits_for_its_disk(monkeypatch, caplog):
    monkeypatch.setenv("PSENGINE_STALL_S", "0.6")
    may_answer = threading.Event()

    def pull(peer, route, message):
        asked.append(message)
        return []

    def pending(peer, route, message):
        if may_answer.is_set():
            return peer.reply(asked[0], T.VALUES, version=1, payload=torch.ones(SPECS[0].numel))
        return peer.reply(message, T.PENDING, body={"waiting_for": [], "log": True})

    asked = []
    with connected() as (peer, session):
        peer.script |= {T.PULL: pull, T.WAITS: pending}
        pulled = session.pull(0, [torch.empty(SPECS[0].numel)])
        eventually(lambda: any("its log, whose disk may be full" in line for line in lines_of(caplog)), "a reason")
        may_answer.set()
        pulled.wait()
