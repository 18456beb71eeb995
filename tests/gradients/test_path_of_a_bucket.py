"""Through which files a bucket goes, from the hook that fills it to ``.grad``: what one has to read, and pays for."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from support.native_extension import needs_shared_memory
from support.processes import in_ranks
from torch import nn

import psengine
from psengine.tracing.backwards import ALWAYS_SAMPLED_ITERATIONS

PACKAGE = Path(psengine.__file__).parent
MAX_FILES = 11
DRIVER = "gradients/in_flight.py"


def module_of(frame: FrameType | None) -> str | None:
    path = Path(frame.f_code.co_filename) if frame is not None else Path()
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


@needs_shared_memory
@in_ranks(2)
def test_a_bucket_enters_few_files_and_leaves_its_driver_four_times(rank: int, world_size: int) -> None:
    """The files that the second of three buckets enters, and the functions that its driver calls in other files."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    model = psengine.DistributedDataParallel(layers, bucket_cap_mb=40 * 41 * 4 / 2**20, collective="shared_memory")
    for _ in range(ALWAYS_SAMPLED_ITERATIONS + 1):
        model(torch.ones(2, 40)).sum().backward()
    assert len(model.reducer.buckets) == 3
    # The hook that fills the bucket is the reducer's.
    files, calls = {"gradients/reducer.py", DRIVER}, []
    follows = False

    def observe(moment: str, bucket: Any = None, position: int | None = None) -> None:
        nonlocal follows
        follows = bucket is not None and bucket.index == 1 and moment != "written"

    def note(frame: FrameType, event: str, _: object) -> None:
        module = module_of(frame)
        if not follows or event != "call" or module is None:
            return
        files.add(module)
        if module_of(frame.f_back) == DRIVER != module:
            calls.append(frame.f_code.co_name)

    model.reducer.watched.begin = lambda iteration: observe
    loss = model(torch.ones(2, 40)).sum()
    sys.setprofile(note)
    loss.backward()
    sys.setprofile(None)
    assert len(files) <= MAX_FILES, sorted(files)
    assert calls == ["pack_rest", "begin", "result", "unpack"]
