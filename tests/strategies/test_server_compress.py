"""Codecs over servers: what travels up and down, who agrees on it, and what becomes of a residual."""

import os
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.server_process import running_server
from support.shard_world import APPLY, AVERAGE, spec
from support.top_one_codec import TopOne, register

import psengine
from psengine.codecs.base import Codec
from psengine.codecs.cast import Bfloat16
from psengine.codecs.int8 import Int8
from psengine.codecs.onebit import OneBit
from psengine.errors import ConfigurationError, ServerRefusedError
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.parameter_server.server.daemon import _import_plugins

NUMEL = 8
SGD = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def server():
    with running_server(sabotage=register) as running:
        yield running


def enter(
    address: str, job: str, rank: int, codec: Codec, rule: dict[str, Any] = AVERAGE, world_size: int = 2
) -> WorkerSession:
    options = SessionOptions(
        addresses=(address,), job=job, rule=rule, codec=codec, rank=rank, world_size=world_size, timeout_s=20.0
    )
    session = WorkerSession(options)
    try:
        session.start()
        session.enter([spec(0, NUMEL)], lambda one: torch.zeros(one.numel))
        if rule["name"] == "apply" and rank == 0:
            session.configure(0, {"optimizer": "SGD", "groups": [SGD], "runs": [[0, NUMEL, 0]]}).wait()
    except BaseException:
        session.close()
        raise
    return session


def residual(session: WorkerSession) -> list[float]:
    return session.residual(0).tolist()


def test_a_worker_with_another_codec_is_refused(server):
    with closing(enter(server.addresses[0], "agreed", 0, Bfloat16(), world_size=1)):
        for codec, got in ((Int8(), "sync-server:compress=int8"), (psengine.codecs.identity.IDENTITY, "sync-server")):
            with pytest.raises(
                ServerRefusedError, match=rf"expected strategy 'sync-server:compress=bf16', got '{got}'"
            ):
                enter(server.addresses[0], "agreed", 1, codec)


def test_a_server_imports_plugins(tmp_path):
    (tmp_path / "my_codecs.py").write_text("from support import top_one_codec\n\ntop_one_codec.register()\n")
    address = f"ipc://{tmp_path}/socket"
    command = [sys.executable, "-m", "psengine.cli.server", "--bind", address, "--plugins"]
    path = os.pathsep.join([str(tmp_path), str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": path}
    with ExitStack() as context:
        process = context.enter_context(
            subprocess.Popen([*command, "my_codecs"], env=environment, stdout=-1, text=True)
        )
        context.callback(process.kill)
        assert any(line.startswith("psengine-server ready") for line in process.stdout)
        enter(address, "plugins", 0, Int8(), world_size=1).close()
    with pytest.raises(ConfigurationError, match="expected one called 'no_such_module'"):
        _import_plugins(["no_such_module"])


def counts(session: WorkerSession, gradient: torch.Tensor, landing: torch.Tensor) -> bool | None:
    push = session.push(0, gradient, [landing])
    push.wait()
    return push.counts


def test_what_a_refused_gradient_brought_of_the_residual_goes_with_the_next(server):
    with closing(enter(server.addresses[0], "refused", 0, TopOne(), APPLY, world_size=1)) as worker:
        gradient, landing = torch.arange(1.0, 9.0), torch.zeros(NUMEL)
        assert counts(worker, gradient, landing)
        kept = residual(worker)
        poisoned = gradient.clone()
        poisoned[3] = torch.nan
        assert counts(worker, poisoned, landing) is False
        assert residual(worker) == kept
        assert counts(worker, gradient, landing)
        assert landing.tolist() == [0, 0, 0, 0, 0, 0, -14, -8]


def test_what_an_average_that_is_not_finite_brought_of_the_residual_goes_with_the_next(server):
    """A GradScaler skips the step. A worker that has nothing to send later does not give back an older payload."""
    with closing(enter(server.addresses[0], "spoiled", 0, OneBit(), world_size=1)) as worker:
        landing, gradient = torch.zeros(NUMEL), torch.arange(1.0, 9.0)
        kept = []
        for poison in (0.0, torch.inf, 0.0):
            worker.push(0, gradient + poison, [landing]).wait()
            assert bool(landing.isfinite().all()) == (poison == 0)
            kept.append(residual(worker))
        assert kept[0] == kept[1] != kept[2]
        worker.push(0, None, [landing]).wait()
        assert residual(worker) == kept[2]
