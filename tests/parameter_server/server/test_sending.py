"""What a server sends without a copy stays as it was until it has left, whatever happens to the chunk meanwhile."""

from __future__ import annotations

import torch
from support.server_process import Peer, running_server

from psengine.protocol.frames import payload_tensor
from psengine.protocol.messages import MAX_PAYLOAD_BYTES

# The largest chunk, 16 MiB: more than the kernel takes of a loopback connection whose peer does not read (10 MiB).
NUMEL = MAX_PAYLOAD_BYTES // 4
ANSWERS = 4


def push_ones(peer: Peer, sequence: int, version: int) -> None:
    fields = {"dtype": torch.float32, "numel": NUMEL, "payload": torch.ones(NUMEL)}
    peer.send(peer.message("PUSH", key=0, sequence=sequence, version=version, **fields))


def test_weights_on_their_way_to_a_slow_worker_are_not_those_of_a_later_step():
    """Steps of -1 from 0: version v of the weights is -v everywhere, so that torn weights show themselves."""
    with running_server() as server, Peer(server.addresses[0], deaf=True) as slow, Peer(server.addresses[0]) as fast:
        slow.make_job(torch.zeros(NUMEL))
        fast.enter(rank=1)
        for sequence in range(1, ANSWERS + 1):
            push_ones(slow, sequence, 0)
        for sequence in range(1, ANSWERS + 1):
            push_ones(fast, sequence, 0)
            assert fast.receive().type.name == "UPDATED"
        versions = []
        for _ in range(ANSWERS):
            answer = slow.receive()
            assert answer.type.name == "UPDATED"
            values = payload_tensor(answer)
            versions.append(answer.version)
            assert values.min().item() == values.max().item() == -answer.version
        assert versions == sorted(versions)
