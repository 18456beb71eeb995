"""Who shares a host is found out by trying, under real namespaces: names, boot ids and /dev/shm mislead."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
from support.hosts import needs_hosts
from support.native_extension import needs_shared_memory
from support.processes import free_port

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
