"""A wait that lasts names who is missing, whatever they do instead; and changes nothing."""

import logging
import os
import re
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from support.native_extension import SHARED_MEMORY, needs_shared_memory
from support.processes import run_ranks
from support.waiting import eventually

import psengine
from psengine.collectives.c10d import C10dCollective
from psengine.environment.processes import process_state
from psengine.tracing.stall_inspector import stall_after_s

STEPS = 4
SLOW_SHARED_MEMORY = pytest.param(*SHARED_MEMORY.values, marks=[*SHARED_MEMORY.marks, pytest.mark.slow])


def test_the_variable(monkeypatch):
    for text, seconds in [("", 30.0), ("0", 0.0), ("2.5", 2.5), (" 7 ", 7.0), ("-1", 0.0)]:
        monkeypatch.setenv("PSENGINE_STALL_S", text)
        assert stall_after_s() == seconds
    for text in ("soon", "1 2"):
        monkeypatch.setenv("PSENGINE_STALL_S", text)
        with pytest.raises(psengine.EnvironmentVariableError, match="PSENGINE_STALL_S"):
            stall_after_s()


class _Listener(logging.Handler):
    """Keeps what the inspector says; ``heard`` is set, and ``on_warning`` called, at the first warning."""

    def __init__(self, on_warning=lambda: None):
        super().__init__()
        self.texts = {"WARNING": [], "INFO": []}
        self.heard = threading.Event()
        self._on_warning = on_warning
        logger = logging.getLogger("psengine.tracing.stall_inspector")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        self.texts[record.levelname].append(record.getMessage())
        if record.levelname == "WARNING" and not self.heard.is_set():
            self.heard.set()
            self._on_warning()


def _until_set(key):
    eventually(lambda: dist.distributed_c10d._get_default_store().check([key]))


def _say(key):
    dist.distributed_c10d._get_default_store().set(key, "yes")


def _train(rank, collective, before_last_step):
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(torch.nn.Linear(8, 4), collective=collective)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(10 * rank + step)
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).square().mean()
        if step == STEPS - 1:
            before_last_step()
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _check_equal_to_undisturbed(rank, collective, found):
    for value, other in zip(found, _train(rank, collective, lambda: None), strict=True):
        assert torch.equal(value, other)


def _one_sleeps(rank, world_size, collective):
    listener = _Listener(lambda: _say("heard"))
    found = _train(rank, collective, lambda: _until_set("heard") if rank == 1 else None)
    if rank == 0:
        eventually(lambda: listener.texts["INFO"])
    _check_equal_to_undisturbed(rank, collective, found)
    return listener.texts, os.getpid()


@pytest.mark.parametrize("collective", ["c10d", SLOW_SHARED_MEMORY])
def test_a_rank_that_comes_late_is_named_and_training_goes_on(monkeypatch, collective):
    monkeypatch.setenv("PSENGINE_STALL_S", "0.5")
    (texts, _), (others, process_id) = run_ranks(_one_sleeps, 2, collective)
    warning = texts["WARNING"][0]
    assert "all-reduce of gradient bucket 0 (" in warning
    assert "weight" in warning
    assert "bias" in warning
    assert f"Missing: rank 1 (process {process_id} on " in warning
    assert "not waiting in any psengine operation" in warning
    assert "no longer waits for all-reduce of gradient bucket 0" in texts["INFO"][0]
    assert others["WARNING"] == []


def _host_of_the_store_is_stopped(rank, world_size, port_file):
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port_file.with_suffix(".tmp").write_text(str(store.port))
        port_file.with_suffix(".tmp").rename(port_file)
    else:
        eventually(port_file.exists)
        store = dist.TCPStore("127.0.0.1", int(port_file.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    process_id = int(psengine.gather(os.getpid())[0])
    listener = _Listener(lambda: os.kill(process_id, signal.SIGCONT))
    deadline = threading.Timer(60, os.kill, (process_id, signal.SIGCONT))

    def before_last_step():
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            eventually(lambda: process_state(process_id) == "T")
            deadline.start()

    found = _train(rank, "shared_memory", before_last_step)
    deadline.cancel()
    _check_equal_to_undisturbed(rank, "shared_memory", found)
    dist.barrier()  # the store serves until everybody is done
    return listener.texts, process_id


@needs_shared_memory
def test_the_stopped_host_of_the_store_is_named_by_what_is_known_without_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PSENGINE_STALL_S", "0.5")
    _, (texts, process_id) = run_ranks(_host_of_the_store_is_stopped, 2, tmp_path / "port", init_group=False)
    assert texts["WARNING"], "the inspector waits for the store"
    assert f"Missing: rank 0 (process {process_id} on " in texts["WARNING"][0]
    assert "stopped by a signal)." in texts["WARNING"][0]
    assert "The rendezvous store does not answer" in texts["WARNING"][0]


def _one_is_elsewhere(rank, world_size, collective):
    """Rank 2 meets the others in another group, whose barrier they reach only when they have been told of it."""
    other = C10dCollective(dist.new_group(list(range(world_size))))
    listener = _Listener(lambda: _say(f"heard/{rank}"))
    helpers = []

    def before_last_step():
        if rank == 2:
            other.barrier().wait()
        else:
            helper = threading.Thread(target=lambda: [_until_set("heard/0"), other.barrier().wait()])
            helper.start()
            helpers.append(helper)

    found = _train(rank, collective, before_last_step)
    for helper in helpers:
        helper.join(30)
    _check_equal_to_undisturbed(rank, collective, found)
    return listener.texts


@pytest.mark.parametrize("collective", ["c10d", SLOW_SHARED_MEMORY])
def test_a_rank_in_another_operation_is_named_with_it(monkeypatch, collective):
    monkeypatch.setenv("PSENGINE_STALL_S", "0.5")
    first, second, _ = run_ranks(_one_is_elsewhere, 3, collective)
    warning = first["WARNING"][0]
    assert "all-reduce of gradient bucket 0" in warning
    assert "Missing: rank 2 (process " in warning
    assert "which waits for another: barrier, operation 1." in warning
    assert not any(re.search("waited .* for all-reduce", one) for one in second["WARNING"])  # said once


def _one_waits_for_a_server(rank, world_size, address, server):
    os.environ["PSENGINE_SERVERS"] = address
    model = psengine.DistributedDataParallel(torch.nn.Linear(8, 4), strategy="async")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    listener = _Listener(lambda: os.kill(server, signal.SIGCONT))
    if rank == 1:
        os.kill(server, signal.SIGSTOP)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    psengine.sum(1)
    model.leave()
    return listener.texts["WARNING"]


def test_a_rank_that_waits_for_a_server_is_named_with_it(monkeypatch, server):
    monkeypatch.setenv("PSENGINE_STALL_S", "0.5")
    (warning, *_), others = run_ranks(_one_waits_for_a_server, 2, server.addresses[0], server.pid)
    assert "has waited" in warning
    assert "of sum()" in warning
    assert "Missing: rank 1 (process " in warning
    assert "which waits for another: a server's answer to push 1 of chunk" in warning
    assert others == []
