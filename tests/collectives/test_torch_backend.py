"""The backend "psengine" of torch.distributed: what gloo does, through shared memory; native DDP and others over it."""

import gc
import os
import signal
import sys
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.expectations import raises
from support.interpreters import running_program
from support.marks import slow
from support.native_extension import needs_shared_memory
from support.processes import free_port, in_ranks, run_ranks, run_ranks_to_any_end
from support.tensors import SUMMED, addend
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Native

import psengine
from psengine.collectives.shared_memory import host as shared_host
from psengine.collectives.torch_backend import backend as torch_backend
from psengine.errors import PeerLostError, SharedMemoryUnavailableError

pytestmark = needs_shared_memory

LEFT_TO_GLOO = [torch.uint8, torch.int8, torch.bool]
SIZES = (0, 1, 3, 1001, 300_001)


def single(name: str):
    """all_gather_single or reduce_scatter_single, as this torch calls it."""
    old = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
    return getattr(dist, name, None) or getattr(dist, old[name])


def every_operation(rank: int, world_size: int, group: dist.ProcessGroup) -> dict[Any, Any]:
    """Every operation on many inputs; what it left in the tensors."""
    found: dict[Any, Any] = {}

    def input_of(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return addend(rank, numel, dtype)

    for dtype in SUMMED + LEFT_TO_GLOO:
        for numel in SIZES:
            if not (numel == 0 and dtype in LEFT_TO_GLOO):
                found["all_reduce", dtype, numel] = total = input_of(numel, dtype)
                dist.all_reduce(total, group=group)
            found["broadcast", dtype, numel] = copied = input_of(numel, dtype)
            dist.broadcast(copied, dist.get_global_rank(group, world_size - 1), group=group)
            parts = [torch.empty(numel, dtype=dtype) for _ in range(world_size)]
            dist.all_gather(parts, input_of(numel, dtype), group=group)
            found["all_gather", dtype, numel] = parts
            found["all_gather_single", dtype, numel] = whole = torch.empty(numel * world_size, dtype=dtype)
            single("all_gather_single")(whole, input_of(numel, dtype), group=group)
            if numel == 0 or dtype in LEFT_TO_GLOO or dtype.is_complex:
                continue
            found["reduce_scatter", dtype, numel] = kept = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter(kept, list(input_of(numel * world_size, dtype).chunk(world_size)), group=group)
            found["reduce_scatter_single", dtype, numel] = kept = torch.empty(numel, dtype=dtype)
            single("reduce_scatter_single")(kept, input_of(numel * world_size, dtype), group=group)
    for operation in ("AVG", "MAX", "MIN", "PRODUCT"):
        found[operation] = total = input_of(1001, torch.float32)
        dist.all_reduce(total, getattr(dist.ReduceOp, operation), group=group)
    found["transposed"] = total = input_of(12, torch.float32).view(3, 4).t()
    dist.all_reduce(total, group=group)
    found["several"] = several = [input_of(n, torch.float32) for n in (5, 70_000, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(several, group=group)
    found["coalesced"] = several = [input_of(n, torch.float32) for n in (6, 7)]
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor in several:
            dist.all_reduce(tensor, group=group)
    found["sparse"] = total = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (5,))
    dist.all_reduce(total, group=group)
    # What is left to gloo.
    other, peers = (rank + 1) % world_size, [dist.get_global_rank(group, r) for r in range(world_size)]
    sending = dist.isend(input_of(4, torch.float32), peers[other], group=group)
    found["recv"] = received = torch.empty(4)
    dist.recv(received, peers[rank - 1], group=group)
    sending.wait()
    found["gather"] = gathered = [torch.empty(3) for _ in range(world_size)] if rank == 0 else None
    dist.gather(input_of(3, torch.float32), gathered, peers[0], group=group)
    found["scatter"] = kept = torch.empty(3)
    dist.scatter(kept, [torch.full((3,), float(r)) for r in range(world_size)] if rank == 0 else None, peers[0], group)
    found["reduce"] = total = input_of(9, torch.float32)
    dist.reduce(total, peers[0], group=group)
    found["reduce"] = total if rank == 0 else None
    found["all_to_all"] = exchanged = torch.empty(world_size)
    dist.all_to_all_single(exchanged, input_of(world_size, torch.float32), group=group)
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group=group)
    said = [("from", rank)]
    dist.broadcast_object_list(said, peers[1], group=group)
    found["objects"] = (objects, said)
    x = input_of(2 * world_size, torch.float32)
    found["functional"] = [
        functional.all_reduce(x, "sum", group) + 0,
        functional.all_gather_tensor(x, 0, group) + 0,
        functional.reduce_scatter_tensor(x, "avg", 0, group) + 0,
        functional.broadcast(x, 1, group) + 0,
    ]
    dist.barrier(group=group)
    return found


def flatten(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found.to_dense() if found.is_sparse else found]
    return [tensor for item in found or () for tensor in flatten(item)]


def are_equal(found: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(flatten(found), flatten(expected), strict=True))


@in_ranks(2)
def test_two_ranks_get_what_gloo_gives_to_the_last_bit(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="psengine")
    ours, gloos = (every_operation(rank, world_size, g) for g in (group, dist.group.WORLD))
    assert ours.keys() == gloos.keys()
    assert ours.pop("objects") == gloos.pop("objects")
    assert [key for key, found in ours.items() if not are_equal(found, gloos[key])] == []


@in_ranks(2)
def test_shared_memory_does_what_it_covers(rank: int, world_size: int) -> None:
    """The comparison above would not notice if everything went to gloo."""
    group = dist.new_group(backend="psengine")
    shared, called = group._shared, []
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"):
        begin = getattr(shared, name)
        setattr(shared, name, lambda *given, name=name, begin=begin: called.append(name) or begin(*given))
    x = torch.ones(4)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
    dist.broadcast(x, 0, group=group)
    single("all_gather_single")(torch.empty(8), x, group=group)
    single("reduce_scatter_single")(torch.empty(2), x, group=group)
    dist.barrier(group=group)
    dist.all_reduce(x.to(torch.uint8), group=group)
    dist.reduce(x, 0, group=group)
    assert called == ["all_reduce", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"]


@in_ranks(2)
def test_async_operations_do_not_block_and_complete_in_any_order_of_waits(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="psengine")
    if rank == 1:
        dist.barrier()
    tensors = [torch.full((numel,), float(rank + 1)) for numel in (10, 2_000_000, 7)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    gathered = torch.empty(4)
    works.append(single("all_gather_single")(gathered, torch.full((2,), float(rank)), group=group, async_op=True))
    transposed = torch.arange(6.0).view(2, 3).t() * (rank + 1)
    works.append(dist.all_reduce(transposed, group=group, async_op=True))
    if rank == 0:
        with raises(RuntimeError, "still under way"):
            works[0].wait(timedelta(milliseconds=50))
        assert not works[0].is_completed()
        dist.barrier()  # until here rank 1 has not come
    for work in reversed(works):
        assert work.wait() is True
    assert all(work.is_completed() and work.is_success() for work in works)
    assert [float(tensor.sum()) for tensor in tensors] == [30.0, 6_000_000.0, 21.0]
    assert gathered.tolist() == [0, 0, 1, 1]
    assert torch.equal(transposed, torch.arange(6.0).view(2, 3).t() * 3)
    order: list[int] = []
    futures = []
    for number in range(3):
        future = dist.all_reduce(torch.full((5,), float(number)), group=group, async_op=True).get_future()
        futures.append(future.then(lambda done, number=number: order.append(number) or done.value()[0] + 1))
    assert [float(future.wait()[0]) for future in futures] == [1, 3, 5]
    assert order == [0, 1, 2]
    # Rank 0 never comes back to the group: its thread completes what rank 1 waits for.
    forgotten = torch.full((2_000_000,), float(rank + 1))
    work = dist.all_reduce(forgotten, group=group, async_op=True)
    if rank == 1:
        work.wait()
    dist.barrier()  # over the other group
    work.get_future().wait()
    assert forgotten[-1] == 3
    assert sum(thread.name.startswith("psengine-group") for thread in threading.enumerate()) == 1


def shard_fully(rank: int, world_size: int, backend: str) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(dist.new_group(backend=backend), "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 2))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8) * (rank + step)).square().sum().backward()
        optimizer.step()
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def test_fully_shard_on_cpu():
    # Not in the same processes: DTensor takes two meshes of the same ranks for one.
    for ours, gloos in zip(*(run_ranks(shard_fully, 2, backend) for backend in ("psengine", "gloo")), strict=True):
        assert all(map(torch.equal, ours, gloos))


def start_as_default(rank: int, world_size: int, backend: str, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, world_size=world_size, is_master=rank == 0, wait_for_workers=False)
    before = set(os.listdir("/proc/self/fd"))
    for attempt in range(2):
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(str(attempt), store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        parts = [dist.new_group(ranks) for ranks in ([0, 1], [2])] if world_size == 3 else []
        assert "psengine" in dist.get_backend()
        for group in parts:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                part = torch.tensor([float(rank)])
                works = [dist.all_reduce(t, group=g, async_op=True) for t, g in ((part, group), (total, None))]
                for work in reversed(works):
                    work.wait()
                assert (dist.get_backend(group), float(part)) == ("psengine", 1.0 if rank < 2 else 2.0)
                assert total == 18.0
        forgotten = torch.ones(1000)
        dist.all_reduce(forgotten, async_op=True)
        dist.destroy_process_group()
        del parts
        group = None
        gc.collect()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("psengine-group")]
    leaked = {d for d in set(os.listdir("/proc/self/fd")) - before if "memfd" in descriptor_of(d)}
    assert threads == []
    assert leaked == set()
    assert forgotten[0] == world_size


def descriptor_of(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("psengine", 3), slow("cpu:psengine,cuda:nccl", 2)],
)
def test_default_group_subgroups_and_their_end(backend, world_size):
    run_ranks(start_as_default, world_size, backend, free_port(), init_group=False)


@in_ranks(2)
def test_ranks_of_two_hosts_are_refused(rank: int, world_size: int) -> None:
    if rank == 1:
        shared_host.make_file = lambda *_: -1  # no rank can open this one's memory
    with raises(SharedMemoryUnavailableError, "rank 1 and rank 0 cannot open each other's memory"):
        dist.new_group(backend="psengine")
    dist.barrier()


def test_psengine_init_takes_the_backend_and_registration_has_no_side_effects():
    program = (
        "import threading, warnings, psengine, torch\n"
        "warnings.filterwarnings('error', category=UserWarning)\n"
        "import torch.distributed as dist\n"
        "assert threading.active_count() == 1 and not dist.is_initialized()\n"
        "assert 'psengine.collectives.torch_backend.process_group' not in __import__('sys').modules\n"
        "psengine.init(backend='psengine')\n"
        "assert dist.get_backend() == 'psengine'\n"
        "x = torch.ones(3); dist.all_reduce(x, async_op=True)\n"
        "assert threading.active_count() == 2\n"
        "print('done')\n"  # and the interpreter exits with the thread running
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(psengine.__file__).parents[1])}
    with running_program(program, environment) as run:
        assert (run.wait(), run.stdout) == (0, "done\n"), run.stderr


def lose_a_rank(rank: int, world_size: int, how: str) -> tuple[str, Any]:
    group = dist.new_group(backend="psengine")
    tensor = torch.ones(3_000_000)
    dist.all_reduce(tensor, group=group)
    if rank != 1 and how == "ddp":
        dist.all_reduce(tensor, group=group, async_op=True)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if how == "wait":
            dist.all_reduce(tensor, group=group, async_op=True).wait()
        elif how == "ddp":
            model = Native(nn.Linear(4, 4), process_group=group, init_sync=False)
            model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        dist.destroy_process_group(group)
        return str(error), getattr(error, "ranks", None)
    raise AssertionError("went on without rank 1")


@pytest.mark.parametrize("how", ["wait", "ddp"])
def test_a_killed_rank_is_named(how):
    results = run_ranks_to_any_end(lose_a_rank, 3, how, deadline_s=40)  # the group's timeout is 60 s
    assert results[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert results[rank].error is None, results[rank].error
        message, ranks = results[rank].value
        assert "Lost rank 1 (process " in message, message
        if how == "wait":
            assert ranks == (1,)


def die_as_ranks_meet(rank: int, world_size: int, port: int) -> tuple[int, ...]:
    if rank == 2:
        shared_host._can_open = lambda place: os.kill(os.getpid(), signal.SIGKILL)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    try:
        dist.init_process_group("psengine", store=store, rank=rank, world_size=world_size)
    except PeerLostError as error:
        return error.ranks
    raise AssertionError("met without rank 2")


def test_a_rank_that_is_killed_while_the_default_group_is_made_is_named():
    results = run_ranks_to_any_end(die_as_ranks_meet, 3, free_port(), init_group=False)
    assert results[0].value == (2,), results[0].error


@in_ranks(2)
def test_the_groups_timeout_is_kept(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="psengine")
    dist.all_reduce(torch.ones(3), group=group)
    # Not before, because to set up a group may take longer.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), group)
    if rank == 1:
        dist.barrier()
    late, others = ["another rank stopped waiting for this one"], ["Lost rank 1", "did not arrive within 0.3 s"]
    with raises(RuntimeError, *(late if rank == 1 else others)):
        dist.all_reduce(torch.ones(3), group=group)
    if rank == 0:
        dist.barrier()


def test_without_torch_distributed_nothing_is_registered(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d")  # which such a torch never imports
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(dist.Backend, "register_backend", None)
    torch_backend.register()
