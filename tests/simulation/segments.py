"""The memory that a worker shares with servers: the real places in real memory; its stream to a shard is simulated.

worker   offer ─► attached at once, or refused        END: payloads travel from now on; it may still be reading
         end of the stream ─► soon after, the shard hears that nobody reads        a death ends all its streams
"""

from __future__ import annotations

import os
import socket
import weakref
from typing import TYPE_CHECKING

import torch

from psengine.codecs.base import Codec
from psengine.errors import ProtocolError
from psengine.parameter_server.client.segments import WorkerSegments
from psengine.parameter_server.segments.memory import SegmentMapping
from psengine.parameter_server.segments.offer import Answer, Offer, read_answer, read_offer, to_bytes
from psengine.parameter_server.segments.passing import END, Lent
from psengine.parameter_server.server.transport.segments import WorkerSegment
from simulation.clock import Clock
from simulation.network import place_of

if TYPE_CHECKING:
    from simulation.server import ServerProcess
    from simulation.world import Simulation

HEARS_S = 0.02


class Stream:
    """A worker's end: it has ended for the shard once the worker and the reader of the lent memory have closed it."""

    def __init__(self, clock: Clock, server: ServerProcess, shard: int, segment: WorkerSegment) -> None:
        self._clock, self._server, self._shard, self._segment = clock, server, shard, segment
        self._is_closed = self._has_ended = False
        self.is_read = False  # whether something refers to the lent memory

    def send(self, data: bytes) -> None:
        """The worker's last word."""
        assert data == END
        self._tell(reads_on=True)

    def close(self) -> None:
        """The worker's descriptor."""
        self._is_closed = True
        self._look()

    def read_no_more(self) -> None:
        """The reader's descriptor."""
        self.is_read = False
        self._look()

    def died(self) -> None:
        """The kernel closes both."""
        self._is_closed, self.is_read = True, False
        self._look()

    def _look(self) -> None:
        if self._is_closed and not self.is_read and not self._has_ended:
            self._has_ended = True
            self._tell(reads_on=False)

    def _tell(self, *, reads_on: bool) -> None:
        self._clock.after(HEARS_S, self._hear, reads_on)

    def _hear(self, reads_on: bool) -> None:
        server = self._server
        if server.is_paused and server.is_up:
            self._tell(reads_on=reads_on)
        elif server.is_up:
            server.threads[self._shard].segments.forget(self._segment, reads_on=reads_on)


def _end_reading(stream: weakref.ref[Stream]) -> None:
    if (known := stream()) is not None:
        known.read_no_more()


class SimulatedSegments(WorkerSegments):
    """Those of one worker."""

    def __init__(self, world: Simulation, codec: Codec) -> None:
        super().__init__(is_wanted=True, codec=codec)
        self._world = world
        self._streams: list[Stream] = []

    def died(self) -> None:
        """The process has ended."""
        for stream in self._streams:
            stream.died()

    def _path_to(self, address: str) -> str | None:
        return address

    def _pass(self, path: str, offer: Offer, descriptor: int) -> tuple[socket.socket, Lent | None]:
        index, shard = place_of(path)
        server = self._world.network.servers[index]
        if not server.is_up or server.is_paused:
            raise TimeoutError("timed out")
        offer_there = read_offer(to_bytes(offer))
        segment = WorkerSegment(offer_there, SegmentMapping(descriptor, offer_there.size_bytes))
        reason = server.threads[shard].segments.attach(server.shards[shard], segment)
        if reason:
            raise ProtocolError(reason)
        stream = Stream(self._world.clock, server, shard, segment)
        self._streams.append(stream)
        lent, descriptors = segment.lends()
        table = read_answer(to_bytes(Answer(lent=lent)), offer)
        if not descriptors:
            return stream, None  # type: ignore[return-value]
        copy = os.dup(descriptors[0])
        try:
            mapping = SegmentMapping(copy, table.size_bytes, is_written=False)
        finally:
            os.close(copy)
        stream.is_read = True
        # A strong reference here would keep the whole simulation for ever.
        keeper = weakref.finalize(mapping.memory, _end_reading, weakref.ref(stream))
        keeper.atexit = False
        lent_memory = Lent(mapping.tensor(0, table.size_bytes, torch.uint8), table, keeper)  # type: ignore[arg-type]
        return stream, lent_memory  # type: ignore[return-value]
