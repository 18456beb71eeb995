"""Servers killed by SIGKILL while workers push rows: nothing is lost, nothing is doubled, and the bits are the same."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import torch
from attacks.kill_loop import LEASE_S, PATIENCE_S, Servers
from support.shard_world import APPLY, MERGE, table
from support.worker_sessions import all_entered

from psengine.kernels.row_table import RowTable, part_of, sum_by_row
from psengine.parameter_server.client.worker_session import wait_all
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.snapshots.files import read_needed_rows
from psengine.parameter_server.server.snapshots.generations import Generations
from psengine.protocol.rows import pack_rows

WORKERS, PARTS, ROWS, DIM = 2, 4, 4000, 8
SPECS = [table(part, DIM, rows=ROWS, part=part, parts=PARTS, optimizer="rowwise_adagrad") for part in range(PARTS)]
IDS = torch.arange(ROWS)
PART_OF = part_of(IDS, PARTS, SPECS[0].table.seed)


def uses(rank, step, *, are_apart):
    """What a worker pushes in a step, first all rows: ids and gradients; ``are_apart``: no other worker has these."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    ids = torch.randperm(ROWS, generator=generator)[: ROWS if step == 1 else 40].sort().values
    ids = ids[ids % WORKERS == rank] if are_apart else ids
    return ids, torch.randn(len(ids), DIM, generator=generator)


def train(session, steps, *, are_apart):
    for step in steps:
        ids, rows = uses(session.rank, step, are_apart=are_apart)
        pushes = []
        for one in SPECS:
            here = PART_OF[ids] == one.key
            of_rows = {"rows": int(here.sum()), "lr": 0.1, "divisor": 1 if are_apart else WORKERS}
            pushes.append(session.push(one.key, pack_rows(ids[here], rows[here].contiguous()), [], **of_rows))
        wait_all(pushes)


def expected(steps, *, are_apart):
    """The rows after these steps of all workers, undisturbed."""
    of = SPECS[0].table
    twin = RowTable(DIM, optimizer=of.optimizer, eps=of.eps, seed=of.seed, number=of.number, std=of.std)
    for step in steps:
        pairs = [uses(rank, step, are_apart=are_apart) for rank in range(WORKERS)]
        twin.step(*sum_by_row(pairs), 0.1, step)
    found = torch.empty(ROWS, DIM)
    twin.gather(IDS, found)
    return found, twin.rows


@pytest.mark.parametrize("rule", [APPLY | {"max_staleness": 2}, MERGE | {"quorum": WORKERS}], ids=["async", "average"])
def test_rows_survive_servers_that_are_killed(tmp_path, rule):
    def options(number):
        return {"snapshot_dir": tmp_path / str(number), "durability": "log", "snapshot_interval_s": 0.2}

    are_apart, chance = rule["name"] == "apply", random.Random(5)
    with ExitStack() as stack:
        servers = Servers(stack, options)
        sessions = all_entered(servers.addresses, WORKERS, SPECS, rule=rule, timeout_s=PATIENCE_S)
        for session in sessions:
            stack.callback(session.close, failed=True)
        pool, step, has_ended = stack.enter_context(ThreadPoolExecutor(WORKERS)), 0, threading.Event()

        def work(session):
            own = 0
            while not has_ended.is_set() or own < step:
                own += 1
                train(session, [own], are_apart=are_apart)
                if not has_ended.is_set():
                    counts[session.rank] = own
            return own

        counts = [0] * WORKERS
        futures = [pool.submit(work, session) for session in sessions]
        files = 0  # that one generation needs
        for number in (0, 1, 1, 0):
            time.sleep(chance.uniform(0.2, 2 * LEASE_S))
            servers.kill(number)
            disk = DirectoryDisk(tmp_path / str(number))
            with suppress(OSError):  # the server deletes what it needs no more
                files = max([files, *(len(read_needed_rows(disk, one)) for one in Generations(disk).numbers())])
        step = max(counts) + 20
        has_ended.set()
        assert {future.result(4 * PATIENCE_S) for future in futures} == {step}
        found = torch.empty(ROWS, DIM)
        for one in SPECS:
            ids = IDS[one.key == PART_OF]
            found[ids] = sessions[0].pull(one.key, ids=ids).wait().payload.view(-1, DIM)
        status = [report["jobs"]["job"] for report in sessions[0].status()]
    assert files > 1  # some had only what changed
    values, rows = expected(range(1, step + 1), are_apart=are_apart)
    assert torch.equal(found, values)
    assert sum(job["table_rows"]["users"] for job in status) == rows
