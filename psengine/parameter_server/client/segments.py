"""The memory that a worker shares with the shards of its host, so that payloads need not travel.

    training   allocate ─► gradients are packed here ─► push
    I/O thread                       offer: RESUME ─► ◄─ resumed: RESUMED      place: PUSH ─► ◄─ fetch: UPDATED

A gradient that lies here is read here; any other travels. It is not written before the push's step is complete: the
shard, or one that comes after it, may need the same bytes until then. The answer lies in the shard's memory, which does
not change there before the chunk's next push.

Whatever is missing (no such system, another host, another user, CURVE keys), payloads travel through the sockets as
they do elsewhere. See ``docs/protocol.md``, "Shared memory".
"""

from __future__ import annotations

import logging

import torch

from psengine.environment.local_sockets import is_loopback
from psengine.errors import ProtocolError
from psengine.parameter_server.segment import IS_AVAILABLE, Segment, aligned
from psengine.protocol.messages import Message

logger = logging.getLogger(__name__)


class WorkerSegments:
    """See the module's text.

    Args:
        is_wanted: whether payloads may lie in shared memory at all.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted and IS_AVAILABLE
        self._own: Segment | None = None
        self._used_bytes = 0
        # By address, the memory of each shard that has this worker's.
        self._theirs: dict[str, Segment] = {}
        self._told: set[tuple[str, str]] = set()

    # ---- threads of the training -------------------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> None:
        """Make memory to allocate from, before the session starts."""
        if not self._is_wanted or self._own is not None or size_bytes <= 0:
            return
        try:
            self._own = Segment.make("psengine-worker", size_bytes)
        except OSError as error:
            self._tell("", f"there is no shared memory ({error})")

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised flat memory for gradients, shared where ``reserve`` made enough."""
        own, begin = self._own, self._used_bytes
        end = begin + aligned(numel * dtype.itemsize)
        if own is None or not numel or end > len(own.memory):
            return torch.empty(numel, dtype=dtype)
        self._used_bytes = end
        return torch.frombuffer(own.memory, dtype=dtype, count=numel, offset=begin)

    def withdraw(self) -> None:
        """From now on this process may write to the memory whatever it likes, and shards see nothing of it.

        At the end, and after a wait that failed: a shard may hold gradients of that step, which others' averages may
        still need. Tensors stay valid.
        """
        self._is_wanted = False
        self._theirs.clear()
        own, self._own = self._own, None
        if own is not None:
            own.make_private()

    # ---- the I/O thread ----------------------------------------------------------------------------------------

    def offer(self, address: str, way: str, message: Message) -> None:
        """A member's RESUME is about to be encoded: a shard that is reached over a Unix socket may open the memory."""
        if self._own is not None and way.startswith("ipc://"):
            message.body["memory"] = self._own.descriptor
        elif self._own is not None and is_loopback(address):
            self._tell(address, "this user's server has no Unix socket there (another container's /tmp?)")

    def resumed(self, address: str, way: str, message: Message) -> None:
        """RESUMED came: a shard that has taken the memory says where its own is; no other is believed."""
        self._theirs.pop(address, None)
        own, told = self._own, message.body.get("memory")
        if own is None or told is None or not way.startswith("ipc://"):
            return
        process, descriptor, mark = told
        try:
            theirs = Segment.of_process(process, descriptor)
            if theirs.mark != mark:
                raise ProtocolError("another container's process has the server's number")
        except (OSError, ValueError, ProtocolError) as error:
            self._tell(address, str(error))
            return
        theirs.memory.keeps = own  # the shard leaves alone what this process reads
        self._theirs[address] = theirs
        self._tell(address, "")

    def forget(self, address: str) -> None:
        """The shard is reached elsewhere now."""
        self._theirs.pop(address, None)

    def place(self, address: str, message: Message) -> None:
        """A PUSH is about to be encoded: its bytes need not travel where the shard can read them."""
        own, payload = self._own, message.payload
        message.place = None
        if own is not None and address in self._theirs and isinstance(payload, torch.Tensor):
            message.place = own.offset_of(payload)

    def fetch(self, address: str, message: Message) -> bool:
        """An UPDATED without bytes came: its payload is in the shard's memory.

        False: this process has withdrawn from it. The shard answers by bytes on a new connection.
        """
        theirs = self._theirs.get(address)
        if theirs is None or message.place is None or message.dtype is None:
            return False
        message.payload = theirs.tensor(message.place, message.numel, message.dtype)
        return True

    def _tell(self, address: str, reason: str) -> None:
        """Log, once, that memory is shared, or why payloads travel."""
        if (address, reason) in self._told:
            return
        self._told.add((address, reason))
        if reason:
            to = f" to {address}" if address else ""
            logger.info("payloads%s travel through sockets, not through shared memory: %s", to, reason)
        else:
            logger.info("%s shares memory with this worker", address)
