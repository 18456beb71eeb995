"""What the simulation looks at in the product that is nobody's interface: all of it is here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from psengine.protocol.messages import ErrorCode, Message, MessageType
from simulation.reference import Values

if TYPE_CHECKING:
    from simulation.worker import WorkerProcess

# ---- shards --------------------------------------------------------------------------------------------------------


def chunks(shard: Any) -> Iterator[tuple[int, int, Values]]:
    """Of a shard whose job has a view, or is being registered: (key, version, values) of each chunk."""
    for job in shard.jobs.values():
        for key, rule in job.chunks.rules.items():
            yield key, rule.version, rule.values.numpy().copy()


def view_number(shard: Any) -> int:
    """Of the view that a shard has; 0 without one."""
    return max((job.view.number for job in shard.jobs.values() if job.view is not None), default=0)


def last_merge(shard: Any, key: int) -> int:
    """The number of the last decision that a chunk has merged."""
    return next((job.chunks.rules[key]._merged for job in shard.jobs.values() if key in job.chunks.rules), 0)


def held_weights(shard: Any, key: int, rank: int) -> Values | None:
    """What a worker holds of a chunk, by its shard's word, where answers are differences."""
    for job in shard.jobs.values():
        held = job.chunks.rules[key]._held
        if held is not None and rank in held._held:
            return held.values(rank).numpy().copy()  # type: ignore[no-any-return]
    return None


# ---- workers -------------------------------------------------------------------------------------------------------


def forget_at_exit(session: Any) -> None:
    """A session that nobody closes, because its process was killed."""
    session._finalizer.detach()


def open_operations(session: Any) -> list[str]:
    """What a session waits for."""
    core = session.job_connection
    channels = [core.control, *core.links] if getattr(core, "control", None) is not None else core.links
    return [one.describe() for channel in channels for one in channel.open_operations()]


def look_into(process: WorkerProcess, link: int, message: Message) -> bool:
    """Take what a message says of shared memory, as ``Connection``; whether the session gets it."""
    segments, address = process.segments, process.address_of(link)
    assert segments is not None
    if message.type is MessageType.RESUMED:
        segments.resumed(address, message)
    elif message.type is MessageType.ERROR and message.body["code"] == ErrorCode.SEGMENT:
        segments.lost(address, message.body["text"])
    return not message.in_segment or segments.fetch(address, message)
