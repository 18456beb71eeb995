"""Ranks of one host agree on shared memory, and join it."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError, SharedMemoryUnavailableError
from psengine.kernels import native

Made = TypeVar("Made")

# csrc/shared_memory/ring.h, Order
ORDERS = {"ring": 0, "rank": 1}
# csrc/shared_memory/group.h, kMaxWorldSize
MAX_WORLD_SIZE = 64
# A staging slot: pieces that stay in a core's second-level cache while ranks pass them on. Where ranks share cores each
# step costs a change of process instead, so there are fewer and larger ones.
SLOT_BYTES = 512 * 1024
SLOT_BYTES_WHERE_CORES_ARE_SHARED = 1024 * 1024
# csrc/shared_memory/layout.h, kSmallBytes
SLOT_BYTES_PER_RANK = 16 * 1024
PROOF = "psengine-proof"
# Less is not worth other bits than native DDP's.
WORTH_ADVICE = 0.9


class Meeting(NamedTuple):
    """What ranks told each other.

    Attributes:
        facts: by rank, see ``_describe_this_process``.
        orders: by rank, see ``ORDERS``.
        hosts: the ranks of each host, ascending, the host of rank 0 first: those that can open each other's memory.
        token: rank 0's, which no other group has.
    """

    facts: list[tuple[int, ...]]
    orders: list[int]
    hosts: tuple[tuple[int, ...], ...]
    token: bytes


def meet_hosts(meeting: Collective, order: str) -> Meeting:
    """Find out, by trying, which ranks share memory; two exchanges.

    Each rank makes an anonymous file (memfd) with a token in it, and opens those of the others as it would open their
    buckets. Neither a host's name nor its boot id counts: containers of one machine may have those in common and share
    nothing, or share a process table and a user's rights and have other names.
    """
    proof, token = _make_proof()
    try:
        own = torch.tensor([ORDERS[order], *_describe_this_process(), proof, *words_of(token)])
        rows = [row.tolist() for row in meeting.gather(own, what="who shares this host")]
        places = [(row[5], row[6], bytes_of_words(row[7:])) for row in rows]
        sees = torch.tensor([_holds(*place) for place in places])
        seen = [row.tolist() for row in meeting.gather(sees, what="who sees whose memory")]
    finally:
        if proof >= 0:
            os.close(proof)
    facts = [tuple(row[1:6]) for row in rows]
    return Meeting(facts, [row[0] for row in rows], _hosts(facts, seen), places[0][2])


def _make_proof() -> tuple[int, bytes]:
    token = secrets.token_bytes(16)
    if not native.has_shared_memory():
        return -1, token
    try:
        descriptor = os.memfd_create(PROOF, os.MFD_CLOEXEC)
    except OSError:
        return -1, token  # which no rank can open
    os.write(descriptor, token)
    return descriptor, token


def _holds(process_id: int, descriptor: int, token: bytes) -> bool:
    """Whether this process can open that descriptor of that process, and finds the token there."""
    path = f"/proc/{process_id}/fd/{descriptor}"
    try:
        # In another process namespace the number may be any process's, and opening some files has effects.
        if descriptor < 0 or not os.readlink(path).startswith(f"/memfd:{PROOF}"):
            return False
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.pread(opened, len(token), 0) == token
    finally:
        os.close(opened)


def _hosts(facts: list[tuple[int, ...]], sees: list[list[bool]]) -> tuple[tuple[int, ...], ...]:
    """Ranks by host. ``sees``: by rank, whether it can open the memory of each other rank."""
    hosts: list[list[int]] = []
    for rank in range(len(facts)):
        for host in hosts:
            is_of_host = all(sees[rank][other] and sees[other][rank] for other in host)
            is_process = all(facts[rank][-1] != facts[other][-1] for other in host)  # not a thread of one
            if is_of_host and is_process and len(host) < MAX_WORLD_SIZE:
                host.append(rank)
                break
        else:
            hosts.append([rank])
    return tuple(map(tuple, hosts))


def join_host_group(meeting: Collective, order: str) -> Any:
    """Join this rank to its group's shared memory and return the native handle; all ranks succeed, or all raise.

    Five exchanges over ``meeting``: each rank's host, who sees whom, the control block's place, has everybody joined,
    does everybody see everybody. ``order``: in which values are added, one of ``ORDERS``.

    Raises:
        ConfigurationError: the ranks have chosen different orders.
        SharedMemoryUnavailableError: the ranks do not share a host, or cannot open each other's memory.
    """
    met = meet_hosts(meeting, order)
    _check_orders(met.orders)
    if len(met.hosts) > 1:
        reason = _reason_against(met.facts) or f"ranks {met.hosts[1][0]} and 0 cannot open each other's memory"
        reason += advice_for(met.hosts)
        raise SharedMemoryUnavailableError(f"collective 'shared_memory' cannot connect these ranks: {reason}")
    file_descriptor, token = _create_control(meeting) if meeting.rank == 0 else (-1, bytes(16))
    try:
        control = torch.tensor([os.getpid(), file_descriptor, *words_of(token)])
        meeting.broadcast([control], 0, what="where shared memory is").wait()
        process_id, descriptor, *words = control.tolist()
        path, token = f"/proc/{process_id}/fd/{descriptor}", bytes_of_words(words)
        extension, rank, world_size = native.extension, meeting.rank, meeting.world_size
        group = succeed_together(
            meeting, lambda: extension.shared_memory_join(path, rank, world_size, token, ORDERS[order])
        )
        succeed_together(meeting, lambda: extension.shared_memory_watch_peers(group))
    finally:
        if file_descriptor >= 0:
            os.close(file_descriptor)
    return group


def advice_for(hosts: Sequence[Sequence[int]]) -> str:
    """A sentence where another collective would send clearly fewer bytes between hosts; empty where it would not."""
    world_size = sum(map(len, hosts))
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    # A ring all-reduce of n bytes sends 2 n (W - 1) / W over each of its links; these are the links that leave a host.
    leaving = max(sum(host_of[rank] != host_of[(rank + 1) % world_size] for rank in host) for host in hosts)
    ring = leaving * (world_size - 1) / world_size
    ratio = (len(hosts) - 1) / len(hosts) / ring if ring else 1.0
    if ratio > WORTH_ADVICE:
        return ""
    return (
        f". These are {world_size} ranks on {len(hosts)} hosts: collective='hierarchical' sends {ratio:.2f} of the"
        " bytes between hosts, and adds in another order than native DDP"
    )


def _check_orders(chosen: list[int]) -> None:
    if len(set(chosen)) > 1:
        names = [name for number in chosen for name, known in ORDERS.items() if known == number]
        raise ConfigurationError(
            f"all ranks add in the same order (expected order={names[0]} of rank 0 on every rank, got, by rank,"
            f" {', '.join(names)}). Fix: give every rank the same collective, 'shared_memory:order=rank' or"
            " 'shared_memory'."
        )


def _describe_this_process() -> tuple[int, ...]:
    """Numbers that tell whether ranks can share memory: has the extension, kernel, process namespace, user, id."""
    if not native.has_shared_memory():
        return (0, 0, 0, 0, 0)
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return (2, 0, 0, 0, 0)
    boot_number = int.from_bytes(hashlib.sha256(boot_id).digest()[:7], "little")
    return (1, boot_number, namespace, os.geteuid(), os.getpid())


def _reason_against(facts: list[tuple[int, ...]]) -> str | None:
    """Why processes of these descriptions cannot share memory; None where the descriptions do not tell."""
    without = [rank for rank, (has_extension, *_) in enumerate(facts) if has_extension != 1]
    if without:
        what = "the native extension" if facts[without[0]][0] == 0 else "Linux's /proc"
        return f"rank {without[0]} runs without {what}"
    if len(facts) > MAX_WORLD_SIZE:
        return f"there are too many (expected at most {MAX_WORLD_SIZE}, got {len(facts)})"
    for position, name in ((1, "host"), (2, "process namespace (container)"), (3, "user")):
        other = next((rank for rank, fact in enumerate(facts) if fact[position] != facts[0][position]), None)
        if other is not None:
            return f"rank {other} runs in another {name} than rank 0"
    if len({process_id for *_, process_id in facts}) < len(facts):
        return "several ranks are threads of one process"
    return None


def _create_control(meeting: Collective) -> tuple[int, bytes]:
    has_core_for_each = meeting.world_size <= len(os.sched_getaffinity(0))
    slot_bytes = SLOT_BYTES if has_core_for_each else SLOT_BYTES_WHERE_CORES_ARE_SHARED
    slot_bytes = max(slot_bytes, meeting.world_size * SLOT_BYTES_PER_RANK)
    token = secrets.token_bytes(16)
    try:
        return native.extension.shared_memory_create_control(meeting.world_size, slot_bytes, token), token
    except RuntimeError:
        return -1, token  # which no rank can open, so that all raise


def succeed_together(meeting: Collective, action: Callable[[], Made]) -> Made:
    """Return what ``action`` returns; raise on every rank where it fails on one."""
    result: Any = None
    error = None
    try:
        result = action()
    except (OSError, RuntimeError) as failure:
        error = failure
    successes = meeting.gather(torch.tensor([error is None]), what="whether shared memory works")
    failed = [rank for rank, success in enumerate(successes) if not success.item()]
    if failed:
        why = f": {error}" if error is not None else ""
        raise SharedMemoryUnavailableError(
            f"collective 'shared_memory' cannot connect these ranks: ranks {failed} cannot open the others' memory{why}"
        ) from error
    made: Made = result
    return made


def words_of(token: bytes) -> tuple[int, int]:
    """16 bytes as two integers of a tensor."""
    return int.from_bytes(token[:8], "little", signed=True), int.from_bytes(token[8:], "little", signed=True)


def bytes_of_words(words: list[int]) -> bytes:
    """Inverse of ``words_of``."""
    return b"".join(word.to_bytes(8, "little", signed=True) for word in words)
