"""Cut links between hosts, under every strategy and codec: right weights, or a named culprit."""

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.holding import Hold
from support.hosts import DEADLINE_S, Host, HostProcess, emulated_hosts, needs_hosts

pytestmark = needs_hosts

PROGRAM = Path(__file__).parents[1] / "support" / "host_training.py"
CODECS = ("bf16", "fp16", "int8", "fp4", "onebit", "topk,ratio=0.1")
OVER_COLLECTIVES = (
    "sync",
    "sync:shard_optimizer=true",
    "local:every=3",
    "diloco:every=3,fragments=2,overlap=1",
    *(f"sync:compress={codec}" for codec in CODECS),
    "local:every=3,compress=bf16",
    "diloco:every=3,compress=fp4",
)
OVER_SERVERS = (
    "sync-server",
    "async",
    "diloco-server:every=3,quorum=2",
    *(f"sync-server:compress={codec}" for codec in CODECS),
    *(f"async:compress={codec}" for codec in CODECS),
    "diloco-server:every=3,quorum=2,compress=fp4",
)
PORT = 7077
STATUS = (sys.executable, "-m", "psengine.cli.main", "status", "--json", "--server-address")


@dataclass
class WorkerProcesses:
    """The replicas of a training, by rank; their hosts, and over servers the server."""

    hosts: list[Host]
    processes: list[HostProcess]
    servers: list[HostProcess]

    def await_step(
        self, strategy: str, step: int, ranks: Sequence[int] | None = None, timeout_s: float = DEADLINE_S
    ) -> None:
        for rank in range(len(self.processes)) if ranks is None else ranks:
            process = self.processes[rank]
            process.wait_until(lambda process=process: f"{strategy} step {step}\n" in process.stdout, timeout_s)

    def steps(self, strategy: str, rank: int) -> int:
        """How many that replica has taken."""
        return self.processes[rank].stdout.count(f"{strategy} step ")

    def outcome(self, strategy: str, rank: int) -> dict[str, Any]:
        """How that training ended there."""
        process, found = self.processes[rank], re.compile(rf"^{re.escape(strategy)} (\{{.*\}})$", re.MULTILINE)
        result: dict[str, Any] = json.loads(process.wait_until(lambda: found.search(process.stdout))[1])
        return result


@contextmanager
def worker_processes(
    folder: Path,
    strategies: Sequence[str],
    *,
    lease_s: float = 30.0,
    rate: str | None = None,
    round_trip_s: float = 0.0,
    stall_s: float = 30.0,
    **plan: Any,
) -> Iterator[WorkerProcesses]:
    """Three hosts: with a rank each, or two on each of two; over servers the first has a server, the others a worker.

    ``plan`` is host_training.py's. Without ``steps`` there is no undisturbed training, and the other never ends.
    """
    defaults = {"steps": None, "pause_s": 0.01, "timeout_s": 60.0, "collective": "auto", "columns": 64, "holds": {}}
    plan = defaults | plan
    has_group = "server" not in strategies[0] and not strategies[0].startswith("async")
    places = ([0, 0, 1, 1] if plan["collective"] == "hierarchical" else [0, 1, 2]) if has_group else [1, 2]
    plan |= {"strategies": strategies, "folder": str(folder), "has_group": has_group, "size": len(places)}
    (folder / "plan.json").write_text(json.dumps(plan))
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    environment["PSENGINE_STALL_S"] = str(stall_s)
    links = {"rate": rate, "round_trip_s": round_trip_s}
    with emulated_hosts(max(places) + 1, shared=[folder], **links) as hosts, ExitStack() as stack:
        servers = []
        if not has_group:
            command = [sys.executable, "-m", "psengine.cli.server", "--bind", f"tcp://0.0.0.0:{PORT}", "--insecure"]
            command += ["--lease-s", str(lease_s)]
            servers.append(started := stack.enter_context(hosts[0].start(command, environment=environment)))
            started.wait_until(lambda: "ready" in started.stdout + started.stderr)
        processes = []
        for rank, place in enumerate(places):
            if has_group:
                own = {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "MASTER_PORT": "29500"}
                own["MASTER_ADDR"] = hosts[0].name
            else:
                own = {"PSENGINE_WORKER": str(rank), "PSENGINE_WORKERS": str(len(places))}
                own["PSENGINE_SERVERS"] = f"tcp://{hosts[0].name}:{PORT}"
            command = [sys.executable, PROGRAM, folder / "plan.json", str(rank)]
            processes.append(stack.enter_context(hosts[place].start(command, environment=environment | own)))
        yield WorkerProcesses(hosts, processes, servers)


def assert_undisturbed(trained: WorkerProcesses, strategy: str) -> None:
    """The weights are those of the undisturbed training on every rank; with equal bits wherever sums are exact."""
    outcomes = [trained.outcome(strategy, rank) for rank in range(len(trained.processes))]
    assert not any("error" in outcome for outcome in outcomes), outcomes
    for outcome in outcomes:
        disturbed, undisturbed = torch.tensor(outcome["disturbed"]), torch.tensor(outcome["undisturbed"])
        if strategy.startswith("async:compress"):
            assert torch.allclose(disturbed, undisturbed, atol=1e-4), strategy
            continue
        assert torch.equal(disturbed, undisturbed), strategy
        if "overlap" not in strategy:  # a fragment under way reaches replicas that differ
            assert torch.equal(disturbed, torch.tensor(outcomes[0]["disturbed"])), strategy


# Longer than a roll call.
LONG_S = 15.0


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("strategies", "collective", "cut_s"),
    [
        pytest.param(OVER_COLLECTIVES, "auto", 1.5, id="collectives"),
        pytest.param((*OVER_COLLECTIVES[:3], *OVER_COLLECTIVES[4:]), "hierarchical", 1.5, id="hierarchical"),
        pytest.param(OVER_SERVERS, "auto", 1.5, id="servers"),
        (["sync"], "auto", LONG_S),
        (["sync"], "hierarchical", LONG_S),
        (["async"], "auto", LONG_S),
    ],
)
def test_a_cut_link_that_heals_leaves_the_weights_as_they_would_be(tmp_path, strategies, collective, cut_s):
    holds = {strategy: Hold(tmp_path / str(number), 8) for number, strategy in enumerate(strategies)}
    plan = {"steps": 24, "pause_s": 0.15, "holds": {name: hold.description for name, hold in holds.items()}}
    with worker_processes(tmp_path, strategies, collective=collective, **plan) as trained:
        for strategy in strategies:
            trained.await_step(strategy, 3)
            trained.hosts[1].cut()
            holds[strategy].release()
            time.sleep(cut_s)
            trained.hosts[1].mend()
            assert_undisturbed(trained, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", OVER_SERVERS[:3])
def test_a_cut_of_the_servers_link_for_two_leases_ends_nobody(tmp_path, strategy):
    lease_s, hold = 6.0, Hold(tmp_path / "hold", 8)
    plan = {"steps": 60, "pause_s": 0.15, "holds": {strategy: hold.description}}
    with worker_processes(tmp_path, [strategy], lease_s=lease_s, **plan) as trained:
        trained.await_step(strategy, 3)
        trained.hosts[0].cut()
        hold.release()
        time.sleep(2 * lease_s)
        trained.hosts[0].mend()
        assert_undisturbed(trained, strategy)
        (server,) = trained.servers
        assert "evicted" not in server.stdout + server.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "collective"),
    [*((strategy, "auto") for strategy in OVER_COLLECTIVES[:3]), ("sync", "hierarchical")],
)
def test_who_is_beyond_a_link_that_stays_cut_is_named(tmp_path, strategy, collective):
    beyond = [2, 3] if collective == "hierarchical" else [1]
    with worker_processes(tmp_path, [strategy], timeout_s=4.0, collective=collective) as trained:
        trained.await_step(strategy, 3)
        trained.hosts[1].cut()
        for rank in range(len(trained.processes)):
            outcome = trained.outcome(strategy, rank)
            if rank in beyond:  # rank 0 has the store
                assert outcome["ranks"] == [0], outcome
                assert "hangs, or the link to it is cut" in outcome["error"]
            else:
                assert outcome["ranks"] == beyond, outcome


@pytest.mark.slow
@pytest.mark.parametrize("strategy", OVER_SERVERS[:4])
def test_a_worker_beyond_a_link_that_stays_cut_names_the_server_and_the_others_go_on(tmp_path, strategy):
    with worker_processes(tmp_path, [strategy], timeout_s=16.0, lease_s=10.0) as trained:
        trained.await_step(strategy, 3)
        trained.hosts[2].cut()
        outcome = trained.outcome(strategy, 1)
        assert "ServerLostError: tcp://node-0:7077 did not answer" in outcome["error"], outcome
        trained.await_step(strategy, trained.steps(strategy, 0) + 30, [0])


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("strategy", ["sync", "sync-server", "async", "diloco-server:every=1,quorum=2"])
def test_data_that_fills_a_link_starves_neither_heartbeats_nor_roll_calls(tmp_path, strategy):
    """10 Mbit/s and round trips of 20 ms: an all-reduce takes 56 s, the pushes of both workers 28 s and more.

    A server's deadline is shorter: it runs only while nothing moves.
    """
    columns = 60_000 if strategy == "sync" else 20_000
    link = {"rate": "10mbit", "round_trip_s": 0.02}
    timing = (120.0, 30.0) if strategy == "sync" else (15.0, 5.0)
    options = {"timeout_s": timing[0], "lease_s": 10.0, "stall_s": timing[1]}
    with worker_processes(tmp_path, [strategy], columns=columns, **options, **link) as trained:
        trained.await_step(strategy, 1, timeout_s=250)
        said = "\n".join(process.stderr for process in trained.processes)
        waits = [line for line in said.splitlines() if " has waited " in line]
        # Of ranks that wait for each other the first alone says so, if roll calls come through.
        assert waits, "nothing took long"
        for wait in waits:
            assert not re.search("Missing|waits for another|does not answer", wait), wait
        assert not re.search("fenced|rejoin|lease|Lost", said), said
        for server in trained.servers:
            assert "silent for" not in server.stdout + server.stderr, server.stderr
            shown = trained.hosts[0].run([*STATUS, f"tcp://127.0.0.1:{PORT}"])
            (job,) = json.loads(shown.stdout)["jobs"].values()
            assert job["duplicates"] == 0, "something was sent twice"
