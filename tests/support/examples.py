"""The scripts of examples/, run as main programs in ranks that have imported torch already."""

from __future__ import annotations

import gzip
import importlib
import io
import os
import struct
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run_main(rank: int, world_size: int, module: str, *options: object, **variables: str) -> str:
    """Run the script in this rank, with ``variables`` in its environment; return what it printed."""
    os.environ.update(variables)
    sys.path.append(str(EXAMPLES))
    sys.argv = [str(EXAMPLES / f"{module}.py"), *map(str, options)]
    with redirect_stdout(io.StringIO()) as output:
        code = importlib.import_module(module).main()
    assert not code, output.getvalue()
    return output.getvalue()


def write_images(directory: Path) -> Path:
    """Ten classes of noisy images that a few steps can tell apart, as gzipped IDX files: 640 to train, 100 to test.

    Unlike the digits that the examples take by default, they are there without importing scikit-learn.
    """
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(256, (10, 8, 8), generator=generator)
    for name, count in (("train", 640), ("t10k", 100)):
        labels = torch.arange(count) % 10
        noise = torch.randint(-40, 41, (count, 8, 8), generator=generator)
        for kind, values in (("images-idx3", (classes[labels] + noise).clamp(0, 255)), ("labels-idx1", labels)):
            values = values.to(torch.uint8)
            header = bytes((0, 0, 8, values.dim())) + struct.pack(f">{values.dim()}I", *values.shape)
            (directory / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + values.numpy().tobytes()))
    return directory
