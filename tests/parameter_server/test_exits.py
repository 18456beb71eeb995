"""How workers of sync-server leave where a program just ends or is interrupted."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
import torch
from support.interpreters import Interpreter, running_program
from support.server_process import running_server
from support.waiting import eventually
from support.worker_sessions import entered

import psengine
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.messages import Message, MessageType

LEASE_S = 2.0
# Far beyond what these tests take: who waits for it hangs.
TIMEOUT_S = 60.0
LIMIT_S = 20.0

PROGRAM = """
import time
import torch
from support.worker_sessions import entered

session = entered({address!r}, {rank}, world_size=2, timeout_s={timeout_s})
landing = torch.zeros(4)
session.keep_result(0)
session.push(0, torch.full((4,), 1.0), [landing]).wait()
print(landing.tolist(), flush=True)
if {rank} == 1:
    time.sleep(600)
"""


def program(address: str, rank: int) -> AbstractContextManager[Interpreter]:
    """A worker that takes one step and ends without ``close``; rank 1 does not end."""
    text = PROGRAM.format(address=address, rank=rank, timeout_s=TIMEOUT_S)
    roots = (Path(psengine.__file__).parents[1], Path(__file__).parents[1])
    return running_program(text, {"PYTHONPATH": os.pathsep.join(map(str, roots))})


class Deaf:
    """Worker 1, in this process: it hears of no average while ``is_deaf``."""

    def __init__(self, session: WorkerSession, patch: pytest.MonkeyPatch) -> None:
        self.is_deaf = True
        self.was_asked = False
        receive = Link.receive
        received = session._membership.received

        def hear(link: Link, message: Message, now_s: float) -> None:
            if not (self.is_deaf and message.type in (MessageType.UPDATED, MessageType.SENT)):
                receive(link, message, now_s)

        def watch(index: int, message: Message, now_s: float) -> None:
            self.was_asked = self.was_asked or message.type is MessageType.PROGRESS_WANTED
            received(index, message, now_s)

        patch.setattr(Link, "receive", hear)
        patch.setattr(session._membership, "received", watch)


@pytest.mark.parametrize("ends_by", ["the other", pytest.param("Ctrl-C", marks=pytest.mark.slow)])
def test_a_program_that_ends_waits_for_who_lacks_the_average_or_for_ctrl_c(monkeypatch, ends_by):
    with running_server(lease_s=TIMEOUT_S) as server, ExitStack() as context:
        leaver = context.enter_context(program(server.addresses[0], 0))
        session = entered(server.addresses[0], 1, world_size=2, timeout_s=TIMEOUT_S)
        context.callback(session.close)
        other = Deaf(session, monkeypatch)
        landing = torch.zeros(4)
        push = session.push(0, torch.full((4,), 3.0), [landing])
        eventually(lambda: leaver.stdout == "[2.0, 2.0, 2.0, 2.0]\n")
        eventually(lambda: other.was_asked)  # the server holds the leaver's OK
        assert leaver.poll() is None
        if ends_by == "the other":
            other.is_deaf = False
            push.wait()
            assert landing.tolist() == [2.0] * 4
            assert leaver.wait(LIMIT_S) == 0
        else:
            leaver.signal(signal.SIGINT)
            leaver.wait(LIMIT_S)
            other.is_deaf = False
            push.wait()
        # It has said BYE.
        assert [worker["rank"] for worker in server.job("job")[0]["workers"]] == [1]


@pytest.mark.slow
def test_a_program_that_ends_waits_a_lease_for_a_worker_that_died():
    with running_server(lease_s=LEASE_S) as server, ExitStack() as context:
        leaver, other = (context.enter_context(program(server.addresses[0], rank)) for rank in range(2))
        eventually(lambda: other.stdout == "[1.0, 1.0, 1.0, 1.0]\n")
        other.signal(signal.SIGKILL)
        assert leaver.wait(LIMIT_S) == 0
