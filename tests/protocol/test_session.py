"""Who may say what when, and that both ends agree about it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psengine.errors import MisuseError, ProtocolError, PSEngineError
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.protocol.session import (
    CLIENT_SENDS,
    SERVER_SENDS,
    Phase,
    from_client,
    from_server,
    to_client,
    to_server,
)

CLIENT_TYPES = set(MessageType) - SERVER_SENDS


def welcome(state, worker=0):
    return Message(MessageType.WELCOME, worker=worker, body={"state": state})


def error(code):
    return Message(MessageType.ERROR, body={"code": code, "text": ""})


def walk(phase, *messages):
    """The server's view of a conversation."""
    for message in messages:
        message = Message(message) if isinstance(message, MessageType) else message
        step = to_client if message.type in SERVER_SENDS else from_client
        phase = step(phase, message)
    return phase


def raises(error_type, words):
    return pytest.raises(error_type, match=re.escape(words))


T = MessageType


def test_every_type_belongs_to_one_side():
    said = set().union(*CLIENT_SENDS.values())
    assert said == CLIENT_TYPES
    assert not said & SERVER_SENDS
    assert set(CLIENT_SENDS) == set(Phase)


def test_rank_0_initialises_then_pushes():
    begun = walk(Phase.STRANGER, T.HELLO, welcome("initialise"), T.REGISTER, T.REGISTER, T.CONFIGURE)
    assert begun is Phase.GREETED
    assert walk(begun, T.SEAL, T.OK, T.HEARTBEAT, T.LIST, T.PULL, T.PUSH, T.UPDATED) is Phase.MEMBER


def test_a_worker_waits_until_values_are_there():
    assert walk(Phase.STRANGER, T.HELLO, welcome("wait", 1), T.HEARTBEAT, T.HELLO) is Phase.GREETED
    assert walk(Phase.GREETED, T.HELLO, welcome("ready", 1), T.PUSH, T.PROBE, T.PENDING) is Phase.MEMBER


def test_a_late_worker_joins():
    assert walk(Phase.STRANGER, T.HELLO, welcome("join", 2), T.JOIN, T.OK, T.PULL, T.PUSH) is Phase.MEMBER


def test_a_reader_only_looks():
    reader = Phase.READER
    assert walk(Phase.STRANGER, T.HELLO, welcome("ready", worker=0xFFFFFFFF), T.LIST, T.PULL) is reader
    for kind in CLIENT_TYPES - {T.HELLO, T.LIST, T.PULL, T.STATUS, T.HEARTBEAT, T.ECHO, T.BYE}:
        with raises(ProtocolError, f"{kind.name} is not legal from a reader"):
            from_client(reader, Message(kind))


def test_bye_ends_it_and_hello_begins_again():
    assert walk(Phase.MEMBER, T.BYE, T.OK, T.BYE) is Phase.GONE
    assert walk(Phase.GONE, T.HELLO, welcome("ready")) is Phase.MEMBER


def test_a_late_answer_does_not_bring_anyone_back():
    assert walk(Phase.GONE, T.UPDATED, T.OK, T.HEARTBEAT_ACK) is Phase.GONE


@pytest.mark.parametrize("code", [ErrorCode.FENCED, ErrorCode.NOT_MEMBER])
@pytest.mark.parametrize("phase", Phase)
def test_who_is_fenced_is_a_stranger(phase, code):
    assert to_client(phase, error(code)) is from_server(phase, error(code)) is Phase.STRANGER


@pytest.mark.parametrize("code", ["memory", "bad_message", "not_ready", "a code of version 9"])
def test_other_errors_change_nothing(code):
    assert from_server(Phase.MEMBER, error(code)) is Phase.MEMBER


def test_a_stranger_may_only_say_hello_look_and_leave():
    legal = {T.HELLO, T.LIST, T.STATUS, T.BYE}
    assert set(CLIENT_SENDS[Phase.STRANGER]) == legal
    for kind in CLIENT_TYPES - legal:
        with raises(ProtocolError, f"{kind.name} is not legal from a stranger (expected one of BYE, HELLO,") as caught:
            from_client(Phase.STRANGER, Message(kind))
        # What a worker hears from a server that restarted: HELLO again, by itself.
        assert caught.value.code == ErrorCode.NOT_MEMBER


@pytest.mark.parametrize("kind", [T.PUSH, T.PROBE, T.REPEAT, T.ADMIT, T.RESULT])
def test_nobody_pushes_before_there_are_values(kind):
    with raises(ProtocolError, "wait for a WELCOME that says ready") as caught:
        from_client(Phase.GREETED, Message(kind))
    assert caught.value.code == ErrorCode.NOT_READY


def test_nobody_registers_once_the_job_has_begun():
    with raises(ProtocolError, "REGISTER is not legal from a member") as caught:
        from_client(Phase.MEMBER, Message(T.REGISTER))
    assert caught.value.code == ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize("phase", Phase)
def test_neither_side_speaks_for_the_other(phase):
    for kind in SERVER_SENDS:
        with raises(ProtocolError, f"{kind.name} is for servers to send") as caught:
            from_client(phase, Message(kind))
        assert caught.value.code == ErrorCode.BAD_MESSAGE
        with pytest.raises(MisuseError):
            to_server(phase, Message(kind))
    for kind in CLIENT_TYPES:
        with raises(ProtocolError, f"{kind.name} is for clients to send"):
            from_server(phase, Message(kind))
        with pytest.raises(MisuseError):
            to_client(phase, Message(kind))


def test_our_mistakes_are_not_the_peers():
    assert not issubclass(MisuseError, ProtocolError)
    assert issubclass(MisuseError, PSEngineError)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("kind", sorted(CLIENT_TYPES))
def test_a_client_is_stopped_exactly_where_a_server_would_refuse(phase, kind):
    try:
        accepted = from_client(phase, Message(kind))
    except ProtocolError:
        with raises(MisuseError, f"{kind.name} is not legal from a {phase.value}"):
            to_server(phase, Message(kind))
    else:
        assert to_server(phase, Message(kind)) is accepted


answers = st.one_of(
    st.builds(welcome, st.sampled_from(["initialise", "wait", "ready", "join"]), st.sampled_from([0, 1, 0xFFFFFFFF])),
    st.builds(error, st.sampled_from(["fenced", "not_member", "memory"])),
    st.sampled_from([Message(kind) for kind in sorted(SERVER_SENDS - {T.WELCOME, T.ERROR})]),
)


@given(st.lists(st.one_of(answers, st.sampled_from([Message(kind) for kind in sorted(CLIENT_TYPES)])), max_size=30))
def test_both_ends_agree_about_the_phase(messages):
    client = server = Phase.STRANGER
    for message in messages:
        if message.type in SERVER_SENDS:
            server, client = to_client(server, message), from_server(client, message)
        elif message.type in CLIENT_SENDS[client]:
            client, server = to_server(client, message), from_client(server, message)
        assert client is server


def test_what_the_server_refuses_leaves_the_phase_to_the_caller():
    phase = Phase.MEMBER
    with pytest.raises(ProtocolError):
        phase = from_client(phase, Message(T.REGISTER))
    assert phase is Phase.MEMBER
