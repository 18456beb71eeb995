"""One rank of a comparison: joins the launcher's process group, does its work, reports the result or the error.

launcher   store on a free loopback port ─ starts ranks ─ reads reports ─ ends ranks
rank       joins ─ notes what it does ─ report/<rank>: result or error ─ leaves with the others
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from psengine.environment.context import choose_device
from psengine.errors import CollectiveError
from psengine.verify.place import Place
from psengine.verify.side_by_side import RefusedError
from psengine.verify.target import TargetError

REPORT, NOTE = "report", "note"
USAGE, CRASH = "usage", "crash"
_HERE = str(Path(__file__).parent)


def serve(run: Callable[[Place, dict[str, Any]], dict[str, Any]]) -> None:
    """Be the rank that the command line describes; ends the process.

    Args:
        run: does the work; gets what ``launch.run_ranks`` was given as ``work``, and returns JSON types.
    """
    setup: dict[str, Any] = json.loads(sys.argv[1])
    rank = int(setup["rank"])
    faulthandler.enable()
    # The command's own stdout may be read by a program: what the user's code prints goes to stderr.
    os.dup2(2, 1)
    _end_with_parent()
    timeout = timedelta(seconds=float(setup["timeout_s"]))
    store = dist.TCPStore("127.0.0.1", int(setup["port"]), is_master=False, timeout=timeout)
    noted = ["joining the group"]

    def note(text: str) -> None:
        noted[0] = text
        store.set(f"{NOTE}/{rank}", text)

    exit_code = 0
    try:
        note(noted[0])
        place = _join(setup, store, timeout, note)
        result = run(place, setup["work"])
        note("waiting for the other ranks at the end")
        dist.barrier()
        report: dict[str, Any] = {"result": result}
    except BaseException as error:  # the user's code may also end with SystemExit
        report = {"error": _describe(error, noted[0])}
        exit_code = 1
    store.set(f"{REPORT}/{rank}", json.dumps(report))
    if exit_code == 0:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown, in which other libraries' threads have hung.
    os._exit(exit_code)


def _join(setup: dict[str, Any], store: dist.Store, timeout: timedelta, note: Callable[[str], None]) -> Place:
    rank, world_size = int(setup["rank"]), int(setup["world_size"])
    torch.set_num_threads(int(setup["threads"]))
    device, backend = torch.device("cpu"), "gloo"
    if setup["device"] == "cuda":
        count = torch.cuda.device_count()
        device = choose_device(rank, count)
        torch.cuda.set_device(device)
        # nccl does not support two ranks on one GPU.
        backend = "cpu:gloo,cuda:nccl" if count >= world_size and dist.is_nccl_available() else "gloo"
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size, timeout=timeout
    )

    def any_rank(flag: bool) -> bool:
        total = torch.tensor([int(flag)])
        dist.all_reduce(total)
        return bool(total.item())

    return Place(rank=rank, world_size=world_size, device=device, note=note, any_rank=any_rank)


def _end_with_parent() -> None:
    """End this process when the launcher ends, however it ends: our standard input is a pipe that closes then."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        while os.read(pipe, 1024):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="psengine-parent-watch", daemon=True).start()


def _describe(error: BaseException, where: str) -> dict[str, Any]:
    return {
        "unix_s": time.time(),
        "is_consequence": _follows(error),
        "kind": USAGE if isinstance(error, TargetError | RefusedError) else CRASH,
        "message": str(error),
        "type": type(error).__name__,
        "traceback": "".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__))),
        "where": where,
    }


def _follows(error: BaseException) -> bool:
    """Whether ``error``, or a cause of it, is a failed collective: mostly because another rank is gone."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, CollectiveError):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the leading frames of this package; the whole traceback if it has no others."""
    inner = frames
    while inner is not None and inner.tb_frame.f_code.co_filename.startswith((_HERE, "<frozen importlib")):
        inner = inner.tb_next
    return inner or frames
