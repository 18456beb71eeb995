"""The client against real servers."""

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from support.server_process import running_server
from support.shard_world import APPLY, AVERAGE, spec
from support.waiting import eventually
from support.worker_sessions import crew, entered

from psengine.cli.main import main
from psengine.errors import (
    ConfigurationError,
    PSEngineError,
    ReplicaMismatchError,
    ServerError,
    ServerLostError,
    ServerRefusedError,
)
from psengine.parameter_server.client import join
from psengine.parameter_server.client.client import connect, parse_addresses
from psengine.parameter_server.client.embedded import EmbeddedServer
from psengine.parameter_server.client.partition import cut
from psengine.parameter_server.client.worker_session import SessionOptions, WorkerSession, wait_all
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import ErrorCode

NUMEL = 1000


@pytest.fixture(scope="module")
def server():
    with running_server(lease_s=10.0) as process:
        yield process


@pytest.fixture
def job(request):
    return request.node.name


def layout(numel=NUMEL):
    return cut(ChunkKind.PARAMETER, [("weight", (numel,), (1,), numel)], torch.float32, 0)


def worker(addresses, job, rank=0, rule=AVERAGE, timeout_s=20.0, **options):
    return WorkerSession(
        SessionOptions(addresses=addresses, job=job, rule=rule, rank=rank, timeout_s=timeout_s, **options)
    )


def zeros(spec):
    return torch.zeros(spec.numel)


def test_another_model_and_a_taken_rank_are_refused(server, job):
    with worker(server.addresses, job) as first, worker(server.addresses, job, 1) as second:
        with worker(server.addresses, job, rule=None) as reader:
            assert reader.state == "wait"
            with pytest.raises(ServerRefusedError, match="no values of the job yet"):
                reader.layout()
        first.enter(layout(), zeros)
        with pytest.raises(ReplicaMismatchError, match=r"'weight'.*999.*1000"):
            second.enter(layout(999), zeros)
        with pytest.raises(ServerRefusedError, match="rank 0") as caught:
            worker(server.addresses, job).start()
        assert caught.value.code == "duplicate_rank"


def test_a_worker_that_never_comes_is_named(server, job):
    with worker(server.addresses, job, world_size=2) as session, ThreadPoolExecutor(1) as pool:
        entering, control = pool.submit(session.enter, layout(), zeros), session.job_connection.control
        late = eventually(lambda: (one := control.oldest()) and control.waits_for(one) and one)
        late.timeout_s, late.deadline_s = 0.0, late.parking.now_s()  # before which a busy server may say nothing
        with pytest.raises(ServerLostError, match=r"the values of job .* waits for workers \[1\] to come"):
            entering.result()


def test_who_is_slow_in_a_step_is_named(server, job):
    with crew(server.addresses, 2, layout(), job=job) as (a, _):
        late = a.push(0, torch.ones(NUMEL), [torch.empty(NUMEL)])
        eventually(lambda: late.pending)
        late.timeout_s, late.deadline_s = 0.0, late.parking.now_s()
        with pytest.raises(ServerLostError, match=r"push 1 of chunk 0 \(weight\).*waits for workers \[1\]"):
            late.wait()


def test_close_is_idempotent_and_ends_the_thread(server, job):
    before = set(threading.enumerate())
    session = worker(server.addresses, job)
    session.start()
    session.enter(layout(), zeros)
    waiting = session.push(0, torch.ones(NUMEL), [torch.empty(NUMEL)])
    waiting.wait()
    session.start()
    assert len(session.status()) == 1
    session.close()
    session.close()
    eventually(lambda: before.issuperset(threading.enumerate()))
    with pytest.raises(ServerError, match="closed"):
        session.push(0, torch.ones(NUMEL), [])
    assert not any(one["workers"] for one in server.job(job))


def test_a_forgotten_session_ends(server, job):
    before = set(threading.enumerate())
    worker(server.addresses, job).start()
    eventually(lambda: before.issuperset(threading.enumerate()))  # the collector may run on the I/O thread


def test_a_client_trains_like_the_optimizer_itself(server, job):
    torch.manual_seed(1)
    model, twin = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), torch.nn.Conv2d(2, 3, 3)
    twin.load_state_dict(model.state_dict())
    named = dict(model.named_parameters())
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2, "momentum": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.3, momentum=0.9)
    twins = [{**group, "params": [p]} for group, p in zip(groups, twin.parameters(), strict=True)]
    oracle = torch.optim.SGD(twins, lr=0.3, momentum=0.9)
    with connect(server.addresses, job=job, timeout_s=20) as client:
        assert client.register(named, optimizer) == "initialised"
        assert len(client.layout()) == 1  # in which a push may leave out a tensor
        for missing in (None, "bias", "weight", None):
            gradients = {name: torch.randn(p.shape) for name, p in named.items() if name != missing}
            if missing:
                optimizer.param_groups[0]["lr"] = oracle.param_groups[0]["lr"] = 0.05
            for name, parameter in twin.named_parameters():
                parameter.grad = gradients[name].clone() if name in gradients else None
            oracle.step()
            returned = client.push_pull(gradients, into=named)
            assert all(returned[name] is named[name] for name in gradients)
            for values in (named, client.pull()):
                assert torch.equal(values["weight"], twin.weight)
                assert torch.equal(values["bias"], twin.bias)
        with connect(server.addresses, job=job, role="reader", timeout_s=20) as reader:
            with pytest.raises(ConfigurationError, match="a worker registers"):
                reader.register(named, optimizer)
            values = reader.pull()
            assert set(values) == {"weight", "bias"}
            assert torch.equal(values["weight"], model.weight)
            assert values["weight"].stride() == model.weight.stride()
            with pytest.raises(ConfigurationError, match="register"):
                reader.push_pull({"bias": torch.zeros(3)})
        other = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        with connect(server.addresses, job=job, timeout_s=20, rank=1) as second:
            with pytest.raises(ServerRefusedError, match="another optimizer"):
                second.register(dict(other.named_parameters()), torch.optim.SGD(other.parameters(), lr=0.1))
            assert torch.equal(other.weight, model.weight)


def test_values_that_are_not_trained_come_back_as_they_were_pushed(server, job):
    tensors = {"a": torch.arange(4.0), "steps": torch.tensor(3)}
    with connect(server.addresses, job=job, timeout_s=20) as client:
        client.register(tensors, torch.optim.SGD([tensors["a"]], lr=1.0))
        back = client.push_pull({"a": torch.full((4,), 2.0), "steps": torch.tensor(5)})
        assert back["a"].tolist() == [-2.0, -1.0, 0.0, 1.0]
        assert back["steps"].item() == 5
        for gradients, words in (
            ({"b": torch.zeros(4)}, "'b' is no tensor of this job"),
            ({"a": torch.zeros(5)}, r"'a' does not fit \(expected shape \(4,\)"),
            ({"a": torch.zeros(4, dtype=torch.float64)}, "float64"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                client.push_pull(gradients)
        assert client.status()[0]["jobs"][job]["workers"]
        assert [spec.kind.value for spec in client.layout()] == ["parameter", "buffer"]
        said = client.session.telemetry.to_body()
        assert said["steps"] == 1


def test_addresses(monkeypatch):
    monkeypatch.setenv("PSENGINE_SERVERS", "tcp://a:1, ipc:///tmp/x")
    assert parse_addresses(None) == ("tcp://a:1", "ipc:///tmp/x")
    assert parse_addresses(["tcp://[::1]:7077"]) == ("tcp://[::1]:7077",)
    for bad in ("a:7077", "tcp://a", "tcp://a:0", "tcp://a:70770", "tcp://*:1", "inproc://x"):
        with pytest.raises(ConfigurationError, match="malformed"):
            parse_addresses(bad)
    monkeypatch.delenv("PSENGINE_SERVERS")
    with pytest.raises(ConfigurationError, match="PSENGINE_SERVERS"):
        connect()


def test_who_leaves_an_embedded_server_waits_less_for_it(monkeypatch, caplog):
    monkeypatch.setattr(join, "EMBEDDED_LEAVE_S", 1.2)
    with (
        EmbeddedServer.start() as server,
        crew(server.addresses, 2, layout(), is_embedded=True, timeout_s=60.0) as sessions,
    ):
        wait_all([session.push(0, torch.ones(NUMEL), [torch.zeros(NUMEL)]) for session in sessions])
        os.kill(server.process.pid, signal.SIGSTOP)
        sessions[1].close()
        os.kill(server.process.pid, signal.SIGCONT)
    assert re.search(r"did not answer LEAVE for \d\.", caplog.text)


def test_who_leaves_while_the_coordinator_is_away_says_so_when_it_is_back():
    with (
        running_server(lease_s=2.0) as server,
        crew(server.addresses[0], 2) as workers,
        ThreadPoolExecutor(1) as pool,
    ):
        wait_all([one.push(0, torch.ones(4), [torch.zeros(4)]) for one in workers])
        leaver = workers[0].job_connection
        server.signal(signal.SIGSTOP)
        eventually(lambda: not leaver.control.is_up)
        leaving = pool.submit(workers[0].close)
        eventually(lambda: leaver.is_leaving or leaving.done())
        server.signal(signal.SIGCONT)
        leaving.result()
        (departed,) = eventually(lambda: server.coordinated("job")["departed"])
        assert departed["reason"] == "left"


def test_an_embedded_server_that_cannot_start_shows_why():
    with pytest.raises(ServerError, match=r"exit code 2.*\n.*shards"):
        EmbeddedServer.start(arguments=["--shards", "0"])


def step(worker):
    landing = torch.zeros(4)
    push = worker.push(0, torch.ones(4), [landing])
    worker.end_step()
    push.wait()


def test_state_is_spread_and_who_has_no_room_for_it_is_refused():
    def deposit(pieces):
        return lambda: iter([donor.store_blob("worker_state", [torch.zeros(1 << 20, dtype=torch.uint8)] * pieces)])

    with (
        running_server(shards=2, max_memory_bytes=12 << 20) as server,
        crew(server.addresses[0], 1) as (donor,),
        ThreadPoolExecutor(1) as pool,
    ):
        step(donor)
        joining = pool.submit(entered, server.addresses[0], 1)
        while not joining.done():
            donor.serve_joiner(deposit(20))
        with pytest.raises(PSEngineError, match=r"no room for the state.*needs 1048576 bytes") as caught:
            joining.result()
        assert caught.value.code == ErrorCode.MEMORY
        step(donor)
        joining = pool.submit(entered, server.addresses[0], 2)
        while not joining.done():
            donor.serve_joiner(deposit(8))  # more than one shard may have
        with joining.result() as joiner:
            assert len(joiner.pull_blob("worker_state")) == 8
        with pytest.raises(ConfigurationError, match="same process"):
            worker(server.addresses, "another").start()


SPECS = [spec(0, 1000), spec(1, 1000)]


def values(worker):
    landings = [torch.empty(1000), torch.empty(1000)]
    for key, landing in enumerate(landings):
        worker.pull(key, [landing]).wait()
    return [float(landing[0]) for landing in landings]


@pytest.mark.parametrize(("restarts", "trained"), [(False, (0, 1)), (True, (0, 1)), (False, (0,))])
def test_a_run_that_names_other_servers_is_refused_by_name(tmp_path, restarts, trained):
    with ExitStack() as stack:

        def start(name, **options):
            directory = tmp_path / name
            return running_server(durability="log", snapshot_dir=directory, **options)

        running = {name: stack.enter_context(ExitStack()) for name in "abc"}
        servers = {name: running[name].enter_context(start(name)) for name in "abc"}
        at = {name: server.addresses[0] for name, server in servers.items()}
        with crew([at["a"], at["b"]], 1, SPECS, rule=APPLY) as (worker,):
            parameters = [torch.zeros(1), torch.zeros(1)]
            optimizer = torch.optim.SGD(parameters, lr=1.0)
            worker.attach_optimizer(SPECS, optimizer, dict(zip(("p0", "p1"), parameters, strict=True)))
            for key in trained:
                worker.push(key, torch.ones(1000), []).wait()
        if restarts:
            for name in "ab":
                running[name].close()
                running[name].enter_context(start(name, bind=at[name]))
        theirs = f"the values of job 'job' are with {at['a']}, {at['b']}; this worker names them"
        for names, words in {
            "ac": f"with {at['c']} among them, which has none",
            "ba": "in another order",
            "b": "1 server less",
            "a": "1 server less",
            "abc": "1 server more",
            "cab": "1 server more",
        }.items():
            if names == "b" and 1 not in trained:
                continue  # what it has is nobody's work
            with pytest.raises(PSEngineError) as caught, crew([at[name] for name in names], 1, SPECS, rule=APPLY):
                pass
            got = f"(got {', '.join(at[name] for name in names)})"
            assert f"{theirs} {words}. Fix: " in str(caught.value), names
            assert got in str(caught.value), names
        running["b"].close()
        with (
            start("d", bind=at["b"], shards=2),
            pytest.raises(PSEngineError, match="another number of shards"),
            crew([at["a"], at["b"]], 1, SPECS, rule=APPLY),
        ):
            pass
        running["b"].enter_context(start("b", bind=at["b"]))
        with crew([at["a"], at["b"]], 1, SPECS, rule=APPLY) as (worker,):
            assert values(worker) == [-1.0, -1.0 if 1 in trained else 0.0]


def test_a_job_that_was_dropped_at_one_of_its_servers_is_lost_by_name():
    with running_server() as first, running_server() as second:
        addresses = [first.addresses[0], second.addresses[0]]
        with crew(addresses, 1, SPECS, rule=APPLY):
            pass
        with pytest.raises(SystemExit):
            main(["admin", "forget", "--job", "job", "--server-address", addresses[1]])
        what = f"{addresses[1]} is without its weights \\(expected 1 chunks, got 0\\)"
        with pytest.raises(ServerRefusedError, match=what), crew(addresses, 1, SPECS, rule=APPLY):
            pass
