"""collective="hierarchical": its bits, its bytes, its failures. The contract suite runs it on one host."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.hosts import emulated_hosts, needs_hosts
from support.marks import slow
from support.native_extension import needs_shared_memory
from support.other_user import live_on_host, needs_root
from support.processes import free_port, run_ranks, run_ranks_to_any_end
from support.tensors import SUMMED, addend

from psengine.collectives.registry import collective_for, default_group
from psengine.errors import PeerLostError

pytestmark = [needs_shared_memory, needs_root]


def hosts_of(layout: tuple[int, ...]) -> list[list[int]]:
    return [[rank for rank, host in enumerate(layout) if host == number] for number in sorted(set(layout))]


def expected(layout: tuple[int, ...], addends: list[torch.Tensor], scale: float) -> torch.Tensor:
    """The documented order: ranks inside a host, then hosts; 16 bits are carried in float32."""
    dtype = addends[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def add(values: list[torch.Tensor]) -> torch.Tensor:
        total = values[0].to(wide)
        for value in values[1:]:
            total = total + value.to(wide)
        return total.to(dtype)

    scaled = [addend * scale for addend in addends]
    return add([add([scaled[rank] for rank in host]) for host in hosts_of(layout)])


def add_in_order(rank: int, world_size: int, layout: tuple[int, ...]) -> None:
    live_on_host(layout[rank])
    collective = collective_for(default_group(), "hierarchical")
    collective.connect()
    assert [list(host) for host in collective._levels.hosts] == hosts_of(layout)
    for dtype in SUMMED:
        for numel in (0, 1, 7, 5000, 1_300_001):  # the last one goes in pieces
            addends = [addend(other, numel, dtype) for other in range(world_size)]
            for scale in (1.0, 1 / world_size) if dtype.is_floating_point else (1.0,):
                flat = collective.allocate(numel, dtype, torch.device("cpu")).copy_(addends[rank])
                collective.all_reduce(flat, scale).wait()
                assert torch.equal(flat, expected(layout, addends, scale)), (dtype, numel, scale)


@pytest.mark.parametrize(
    "layout", [(0, 0, 1), *map(slow, [(0, 1, 0, 1), (0, 1, 2, 2, 2), (0, 0, 0, 1), (0, 0, 0), (0, 1, 2)])]
)
def test_the_order_of_additions_is_the_documented_one(layout):
    run_ranks(add_in_order, len(layout), layout)


def lose_a_rank(rank: int, world_size: int, layout: tuple[int, ...], victim: int, after_s: float | None) -> Any:
    live_on_host(layout[rank])
    collective = collective_for(default_group(), "hierarchical")
    flats = [torch.ones(2_000_000 if after_s else 200_000) for _ in range(3)]
    collective.all_reduce(flats[0]).wait()
    if rank == victim:
        if after_s is None:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            for work in [collective.all_reduce(flat, 0.5, what="gradient bucket 3") for flat in flats]:
                work.wait()
    except PeerLostError as error:
        assert collective.has_ended
        return error.ranks, str(error)


@pytest.mark.parametrize(
    ("victim", "after_s"),
    [
        (1, None),
        *(slow(victim, None) for victim in (0, 3)),
        # Inside any of the stages.
        *(slow(victim, 0.1 + 0.017 * turn) for victim in range(1, 5) for turn in range(4)),
    ],
)
def test_a_dead_rank_is_named_on_every_host(victim, after_s):
    layout = (0, 0, 1, 1) if victim < 4 else (0, 1, 0, 0, 1)
    results = run_ranks_to_any_end(lose_a_rank, len(layout), layout, victim, after_s)
    for result in results:
        if result.rank == victim:
            assert result.exit_code == -signal.SIGKILL
            continue
        assert result.error is None, result.error
        ranks, message = result.value
        assert ranks == (victim,), message
        assert "gradient bucket 3" in message


SENT_BYTES = """
import torch, torch.distributed as dist
from pathlib import Path
from psengine.collectives.registry import collective_for, default_group
dist.init_process_group("gloo")

def sent():
    return sum(int(line.split()[9]) for line in Path("/proc/net/dev").read_text().splitlines() if "eth0" in line)

flat = torch.ones(4_000_000)
for name in ("c10d", "hierarchical"):
    collective = collective_for(default_group(), name)
    collective.all_reduce(flat, 0.5).wait()
    collective.barrier().wait()
    before = sent()
    for _ in range(4):
        collective.all_reduce(flat, 0.5).wait()
    collective.barrier().wait()
    print(sent() - before, flush=True)
collective.barrier().wait()
"""


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize(
    ("layout", "share"), [((0, 0, 1, 1), 0.67), ((0, 0, 1), 0.75), ((0, 1, 1, 1), 0.67), ((0, 1), 1.0)]
)
def test_hosts_send_the_documented_share_of_a_rings_bytes(layout, share):
    environment = {"WORLD_SIZE": str(len(layout)), "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with emulated_hosts(max(layout) + 1) as hosts, ExitStack() as stack:
        processes, sent = [], []
        for rank, place in enumerate(layout):
            started = hosts[place].start(
                [sys.executable, "-c", SENT_BYTES], environment={**environment, "RANK": str(rank)}
            )
            processes.append(stack.enter_context(started))
        for process in processes:
            assert process.wait() == 0, process.stderr
            sent.append([int(line) for line in process.stdout.split()])
    ring, hierarchical = (max(sizes) for sizes in zip(*sent, strict=True))
    assert hierarchical / ring == pytest.approx(share, rel=0.05)


RANK = """
import os, torch, torch.distributed as dist
from psengine.collectives.registry import collective_for, default_group
from psengine.collectives.shared_memory.host import meet_hosts
dist.init_process_group("gloo")
c10d = collective_for(default_group(), "c10d")
_, hosts = meet_hosts(c10d)
flat = torch.ones(1000)
collective_for(default_group(), "hierarchical").all_reduce(flat).wait()
assert (flat == dist.get_world_size()).all()
collective_for(default_group()).all_reduce(flat, 0.25).wait()
c10d.liveness.look_up_processes()  # all have written where they are, or they would not have met
print(hosts, c10d.liveness.lost_processes())
c10d.barrier().wait()
"""
# A container with a process table of its own, but this machine's host name, boot id, /dev/shm and network.
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
# Another name and another /dev/shm, but the same process table: it shares memory with the ranks outside.
OTHER_NAME = ["unshare", "--uts", "--mount", "sh", "-c"]
RENAME = 'echo elsewhere > /proc/sys/kernel/hostname; mount -t tmpfs tmpfs /dev/shm; exec "$@"'


@needs_hosts
@needs_shared_memory
@pytest.mark.slow
def test_containers_are_hosts_where_they_share_no_process_table():
    program = [sys.executable, "-c", RANK]
    commands = [program, [*CONTAINER, *program], [*OTHER_NAME, RENAME, "sh", *program], program]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(len(commands)),
        "GLOO_SOCKET_IFNAME": "lo",  # the other name has no address
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        processes = []
        for rank, command in enumerate(commands):
            process = subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in processes:
            output, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
            # Rank 1's number means another process, or none, to the others: it is not taken for dead.
            assert output == "((0, 2, 3), (1,)) ()\n"
