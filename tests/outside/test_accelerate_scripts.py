"""accelerate's three main test scripts, which its wheel ships, end over psengine with the bits of native DDP.

pytest's process               ranks (forked with torch imported)
    run(script, over, ...) ────▶ torchrun's variables; stdout and stderr to a file for each rank
                                 install(): whose class wraps models
    models of each rank    ◀──── the script as ``__main__``; what it wrapped, as it was left
"""

import functools
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from support.native_class import drop_devices, replace_native_class
from support.native_extension import needs_shared_memory
from support.processes import RanksFailedError, run_ranks, set_torchrun_variables

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="accelerate's ranks on the CPU speak gloo")

DEADLINE_S = 120.0
# Whether the script does on GPUs only what is no matter of the device; see ``start_accelerate``.
SCRIPTS = {"test_script": False, "test_sync": True, "test_ddp_comm_hook": True}
C10D = {"PSENGINE_STRATEGY": "sync", "PSENGINE_COLLECTIVE": "c10d"}
SHARED_MEMORY = {"PSENGINE_STRATEGY": "sync", "PSENGINE_COLLECTIVE": "shared_memory"}
SERVER = {"PSENGINE_STRATEGY": "sync-server"}
# Who wraps models ("psengine": its class in the place of torch's; "accelerator": PSEngineAccelerator in the place of
# accelerate's; "backend": torch's class over the backend "psengine"), and the variables that select how replicas are
# synchronised.
OVER: dict[str, tuple[str, dict[str, str]]] = {
    "native": ("torch", {}),
    "sync-c10d": ("psengine", C10D),
    "sync-shared_memory": ("psengine", SHARED_MEMORY),
    "sync-server": ("psengine", SERVER),
    "native-over-psengine": ("backend", SHARED_MEMORY),
    "accelerator-sync": ("accelerator", SHARED_MEMORY),
    "accelerator-sync-server": ("accelerator", SERVER),
}
SHORT = {
    *(("test_script", over) for over in ("sync-shared_memory", "accelerator-sync-server")),
    ("test_sync", "sync-shared_memory"),
    *(("test_ddp_comm_hook", over) for over in ("sync-shared_memory", "sync-server")),
}
NO_HOOKS = "takes no communication hook; use strategy='sync'"

Models = list[dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def oracles() -> dict[str, list[Models]]:
    """By script, what native DDP made of it; filled by the first test that asks."""
    return {}


def cases() -> Iterator[object]:
    for script in SCRIPTS:
        for over in list(OVER)[1:]:
            marks = [] if (script, over) in SHORT else [pytest.mark.slow]
            marks += [needs_shared_memory] if OVER[over][1] is SHARED_MEMORY else []
            yield pytest.param(script, over, id=f"{script}-{over}", marks=marks)


@pytest.mark.parametrize(("script", "over"), list(cases()))
def test_script(script: str, over: str, server: Any, oracles: dict[str, list[Models]], tmp_path: Path) -> None:
    address = server.addresses[0]
    pytest.importorskip("accelerate")
    if script == "test_ddp_comm_hook" and OVER[over][1] is SERVER:
        with pytest.raises(RanksFailedError, match=NO_HOOKS):
            run(script, over, address, tmp_path)
        return
    if script not in oracles:
        (tmp_path / "native").mkdir()
        oracles[script] = run(script, "native", address, tmp_path / "native")
    for native, ours in zip(oracles[script], run(script, over, address, tmp_path), strict=True):
        for number, (theirs, own) in enumerate(zip(native, ours, strict=True)):
            assert own.keys() == theirs.keys(), f"model {number}"
            different = [name for name in theirs if not torch.equal(own[name], theirs[name])]
            assert not different, f"model {number}: {different}"


def run(script: str, over: str, address: str, directory: Path) -> list[Models]:
    """Of each rank the models that the script wrapped, in order: parameters and gradients as it left them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, script, over, address, directory)
    try:
        return run_ranks(_run_rank, 2, *arguments, init_group=False, may_have_children=True, deadline_s=DEADLINE_S)
    except RanksFailedError as error:
        logs = sorted(directory.glob("rank-*.log"))
        printed = "\n".join(f"--- {log.stem} printed ---\n{log.read_text(errors='replace')[-10_000:]}" for log in logs)
        raise RanksFailedError(f"{script} over {over}: {error}\n{printed}") from None


def _run_rank(
    rank: int, world_size: int, port: int, script: str, over: str, address: str, directory: Path
) -> list[dict[str, torch.Tensor]]:
    log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    by, variables = OVER[over]
    set_torchrun_variables(rank, world_size, port, ACCELERATE_USE_CPU="true")
    os.environ.update(variables, PSENGINE_SERVERS=address, PSENGINE_JOB=f"{script}-{over}", OMP_NUM_THREADS="1")
    os.chdir(directory)
    # Programs of others warn of what they like; what psengine warns of is an error here too.
    warnings.simplefilter("default")
    warnings.filterwarnings("error", module="psengine")
    wrapped = install(by)
    start_accelerate(world_size, pretend_gpus=SCRIPTS[script])
    numpy.random.default_rng = functools.partial(_seeded, numpy.random.default_rng, rank)
    spec = util.find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    sys.argv = [str(Path(spec.origin).parent / "test_utils" / "scripts" / f"{script}.py")]
    runpy.run_path(sys.argv[0], run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()
    return [_values(model) for model in wrapped]


def _seeded(default_rng: Any, rank: int, seed: Any = None) -> Any:
    """Data that programs draw without a seed, the same whoever wraps."""
    return default_rng(rank if seed is None else seed)


def _values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**values, **gradients}


def install(by: str) -> list[torch.nn.Module]:
    """Put a class where programs find it; return a list that grows by each module that is wrapped."""
    wrapper_classes: list[Any] = [torch.nn.parallel.DistributedDataParallel]
    if by == "psengine":
        wrapper_classes.append(replace_native_class())
    elif by == "accelerator":
        import accelerate

        from psengine.integrations.accelerate import PSEngineAccelerator
        from psengine.wrapper.ddp import DistributedDataParallel

        wrapper_classes.append(DistributedDataParallel)
        accelerate.Accelerator = accelerate.accelerator.Accelerator = PSEngineAccelerator
    elif by == "backend":
        import psengine  # noqa: F401  (makes its backend known)

        dist.init_process_group("psengine")
    wrapped: list[torch.nn.Module] = []
    for wrapper_class in wrapper_classes:
        drop_devices(wrapper_class, wrapped)
    return wrapped


def start_accelerate(world_size: int, *, pretend_gpus: bool) -> None:
    """Make accelerate's state as its launcher does with ``--cpu``.

    ``pretend_gpus`` lets scripts do what they do on GPUs only, though every tensor stays on the CPU. What they skip
    elsewhere is no matter of the device: uneven inputs, accumulation with every kind of loader, and communication hooks
    in bfloat16, which native DDP takes where there is NCCL.
    """
    import accelerate
    from accelerate.utils import DistributedType

    state = accelerate.PartialState(cpu=True)
    assert state.num_processes == world_size, f"accelerate has not seen the launcher: {state}"
    if pretend_gpus:
        state.distributed_type = DistributedType.MULTI_GPU
        torch.version.cuda = "13.0"
        torch.cuda.nccl.version = lambda: (2, 27)
        dist.is_nccl_available = lambda: True
