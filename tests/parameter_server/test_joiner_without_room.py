"""A donor's state is spread over shards; where it has no room, the joiner is refused, and the donor trains on."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.server_process import running_server
from support.worker_sessions import crew, entered

from psengine.errors import PSEngineError
from psengine.protocol.messages import ErrorCode

PIECE_BYTES = 1 << 20


def step(worker):
    landing = torch.zeros(4)
    push = worker.push(0, torch.ones(4), [landing])
    worker.end_step()
    push.wait()


def test_state_is_spread_and_who_has_no_room_for_it_is_refused():
    def deposit(pieces):
        return lambda: iter([donor.store_blob("worker_state", [torch.zeros(PIECE_BYTES, dtype=torch.uint8)] * pieces)])

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
