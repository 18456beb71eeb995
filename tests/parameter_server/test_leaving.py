"""The last step of sync-server: nobody leaves with an average that another lacks, and no step has two results."""

from __future__ import annotations

import atexit
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from support.fault_workers import Reports, results_of, worker_processes
from support.interpreters import running_program
from support.server_process import running_server
from support.shard_world import spec
from support.worker_sessions import entered

from psengine.protocol.messages import MessageType

LEASE_S = 1.0
GRADIENTS = {0: 1.0, 1: 3.0}


def exchange_and_leave(
    reports: Reports, address: str, world_size: int, steps: int, deaf_step: int | None = None
) -> Any:
    """Push a number a step; the averages. From ``deaf_step`` on no answer arrives before the server has restarted."""
    from psengine.parameter_server.client.link import Link

    rank = int(os.environ["PSENGINE_WORKER"])
    specs = [spec(key, 4) for key in range(2)]
    session = entered(address, rank, specs, world_size=world_size, timeout_s=30.0)
    landings = [torch.zeros(4) for _ in specs]
    epochs = {link.index: link.epoch for link in session._membership.links}
    step, receive = 0, Link.receive

    def hear(link: Any, message: Any, now_s: float) -> None:
        is_deaf = deaf_step is not None and step >= deaf_step and message.epoch == epochs[link.index]
        if not (is_deaf and message.type in (MessageType.UPDATED, MessageType.SENT)):
            receive(link, message, now_s)

    Link.receive = hear  # type: ignore[method-assign]
    averages = []
    for step in range(1, steps + 1):
        pushes = []
        for one, landing in zip(specs, landings, strict=True):
            session.keep_result(one.key)
            pushes.append(session.push(one.key, torch.full((4,), GRADIENTS[rank]), [landing]))
        for push in pushes:
            push.wait()
        averages.append([landing[0].item() for landing in landings])
        reports.say("step", step)
    session.close()
    reports.say("left")
    return averages


def test_a_server_that_dies_at_the_last_step_gives_it_one_result(tmp_path):
    """Worker 0 has the last average; worker 1 never hears of it before the server dies."""
    address = f"ipc://{tmp_path}/socket"
    with ExitStack() as context:
        server = context.enter_context(running_server(bind=address, shards=2, lease_s=LEASE_S))
        workers = context.enter_context(worker_processes())
        first = workers.start(exchange_and_leave, address, 2, 3, rank=0)
        second = workers.start(exchange_and_leave, address, 2, 3, 3, rank=1)
        first.wait_for("step", at_least=3)
        time.sleep(0.3)
        assert not first.has_said("left")
        assert not second.has_said("left")
        server.kill()
        context.enter_context(running_server(bind=address, shards=2, lease_s=LEASE_S))
        results = results_of([first, second])
    assert results == [[[2.0, 2.0]] * 3] * 2


def train_and_leave_open(address: str, rank: int) -> Any:
    """A worker's script that closes nothing, in a Python that starts no thread once it exits, as 3.12 and later."""
    session = entered(address, rank, world_size=2)
    for _ in range(3):
        session.push(0, torch.ones(4), [torch.zeros(4)]).wait()

    def start_none(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    atexit.register(setattr, threading.Thread, "start", start_none)  # runs before the session's own end
    return session


def test_scripts_that_close_nothing_leave_where_exits_start_no_thread():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, root / "tests")))}
    with running_server(lease_s=60.0) as server, ExitStack() as context:
        program = (
            f"from parameter_server.test_leaving import *\nsession = train_and_leave_open({server.addresses[0]!r}, "
        )
        scripts = [context.enter_context(running_program(f"{program}{rank})", environment)) for rank in range(2)]
        assert [(script.wait(30.0), script.stdout, script.stderr) for script in scripts] == [(0, "", "")] * 2


# ---- pure ------------------------------------------------------------------------------------------------------------
