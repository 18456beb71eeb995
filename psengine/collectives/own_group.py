"""Groups that one collective alone uses, and that can be left at once, whoever hangs in them.

gloo's works cannot be cancelled: ``abort`` does nothing (torch 2.13), and a group's destructor waits for them, as long
as their timeout. What ends them is a broken connection. So a group here knows its sockets: those that connect two
ranks' listeners, of which each rank has its own. To leave a group is to shut them down: works under way fail, here and
on the ranks that wait for this one. Except a receive that has a part of its message: gloo tells it nothing, so a thread
of its own waits in the destructor.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from psengine.collectives.base import Collective
from psengine.collectives.c10d import INTERRUPTIBLE_SLICE_S, C10dCollective
from psengine.collectives.shared_memory.collective import SharedMemoryCollective
from psengine.environment.threads import begin
from psengine.environment.variables import read_variable
from psengine.errors import CollectiveError

Address = tuple[str, int]

# A group that nothing hangs in has gone by then.
LEAVE_S = 0.1

_making_device = threading.Lock()


class OwnGroup(C10dCollective):
    """A collective over gloo, between ranks that meet in ``store``; torch.distributed does not know of the group.

    Nobody is asked who lives: a broken connection is an error at once, and who is missing is the caller's to know.

    Args:
        store: a torch.distributed store that all ranks reach; used by the thread that makes the group.
        name: of the group; nobody has used it in the store.
        rank, world_size: of the group.
        timeout_s: deadline of meeting, and of every wait.
        host: this rank's name or address, as the others reach it; "" for what torch.distributed would take.

    Raises:
        CollectiveError: some rank did not come.
    """

    def __init__(self, store: Any, name: str, rank: int, world_size: int, timeout_s: float, host: str = "") -> None:
        prefix = _keys_of(store, name)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        try:
            device, address = _listen(host)
            options._devices, options._timeout = [device], timedelta(seconds=timeout_s)
            prefix.set(f"address/{rank}", json.dumps(address))
            gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", prefix), rank, world_size, options)
            self._addresses = {tuple(json.loads(prefix.get(f"address/{other}"))) for other in range(world_size)}
            prefix.set(f"connected/{rank}", "")
        except (RuntimeError, OSError) as error:
            raise CollectiveError(f"rank {rank} of {world_size} did not meet the others: {error}") from error
        group = dist.ProcessGroup(prefix, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        group._set_group_name(dist.distributed_c10d.GroupName(name))
        super().__init__(group, timeout_s, is_watched=False)
        self._groups = [group]  # its only reference; none once it was abandoned

    @override
    def abandon(self) -> None:
        for one in _tcp_sockets():
            with contextlib.suppress(OSError):  # not connected
                if not self._addresses.isdisjoint((one.getsockname()[:2], one.getpeername()[:2])):
                    one.shutdown(socket.SHUT_RDWR)
        leaving = threading.Thread(target=self._groups.clear, name="psengine-leave-group", daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)


def form_collective(
    store: Any,
    name: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    is_interrupted: Callable[[], bool],
    *,
    host: str = "",
    shares_memory: bool = True,
) -> Collective | None:
    """Return a collective of a new group, connected; None if ``is_interrupted`` returns True before it is.

    Args:
        store: see ``OwnGroup``; used by a thread, which may be left behind in it.
        name: see ``OwnGroup``.
        rank: see ``OwnGroup``.
        world_size: see ``OwnGroup``.
        timeout_s: see ``OwnGroup``.
        is_interrupted: asked now and then.
        host: see ``OwnGroup``.
        shares_memory: over shared memory where all ranks are on one host; the same on every rank.

    Raises:
        CollectiveError: some rank did not come, or died meanwhile.
    """
    made: list[Collective] = []
    is_left = threading.Event()

    def form() -> None:
        group = OwnGroup(store, name, rank, world_size, timeout_s, host)
        made.append(group)
        if shares_memory and world_size > 1:
            made.append(SharedMemoryCollective(group, is_required=False))
        if is_left.is_set():
            made[-1].abandon()
        made[-1].connect()

    formed = begin(form, "psengine-form-group")
    while not wait([formed], INTERRUPTIBLE_SLICE_S).done:
        if is_interrupted():
            is_left.set()
            for group in made[:1]:  # then the thread comes to its end
                group.abandon()
            return None
    formed.result()
    return made[-1]


def unconnected(store: Any, name: str, world_size: int) -> dict[int, str]:
    """The ranks that are not connected to all others, as far as ``store`` tells, and where each of them listens: "" of
    one that did not come to the store.
    """
    keys = _keys_of(store, name)
    addresses = {}
    for rank in range(world_size):
        if not keys.check([f"connected/{rank}"]):
            has_come = keys.check([f"address/{rank}"])
            addresses[rank] = "{}:{}".format(*json.loads(keys.get(f"address/{rank}"))) if has_come else ""
    return addresses


def _keys_of(store: Any, name: str) -> Any:
    return dist.PrefixStore(f"psengine/group/{name}", store)


def _listen(host: str) -> tuple[Any, Address]:
    """A gloo device, and the address at which it listens."""
    interface = (read_variable("GLOO_SOCKET_IFNAME") or "").strip()
    with _making_device:
        # Another thread may listen to something at the same moment.
        for _ in range(10):
            before = set(_listeners())
            if host:
                device = dist.ProcessGroupGloo.create_device(hostname=host)
            elif interface:
                device = dist.ProcessGroupGloo.create_device(interface=interface)
            else:
                device = dist.ProcessGroupGloo.create_default_device()
            made = set(_listeners()) - before
            if len(made) == 1:
                return device, made.pop()
    raise OSError("cannot tell at which address gloo listens")


def _listeners() -> Iterator[Address]:
    for one in _tcp_sockets():
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield one.getsockname()[:2]


def _tcp_sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, whoever made them; each is closed when the next one is asked for."""
    for descriptor in os.listdir("/dev/fd"):
        copy = -1
        try:
            copy = os.dup(int(descriptor))
            one = socket.socket(fileno=copy)
        except OSError:  # no socket, or closed meanwhile
            if copy >= 0:
                os.close(copy)
            continue
        with one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                yield one
