"""The scripts of examples/, run as main programs in ranks that have imported torch already."""

from __future__ import annotations

import gzip
import importlib
import io
import os
import struct
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Ended:
    """How a script ended."""

    code: int
    output: str
    errors: str


def example(module: str) -> ModuleType:
    """A module of examples/; they import each other by name, as they do when one is run."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(module)


def run_main(rank: int, world_size: int, module: str, *options: object, **variables: str) -> Ended:
    """Run the script in this rank, with ``variables`` in its environment."""
    os.environ.update(variables)
    sys.argv = [str(EXAMPLES / f"{module}.py"), *map(str, options)]
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        code = example(module).main()
    return Ended(code, output.getvalue(), errors.getvalue())


def idx(values: torch.Tensor, *, shape: tuple[int, ...] | None = None, kind: int = 8) -> bytes:
    """The bytes of an IDX file; ``shape`` is what its header says."""
    shape = tuple(values.shape) if shape is None else shape
    return bytes((0, 0, kind, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + values.numpy().tobytes()


def write_split(directory: Path, name: str, images: torch.Tensor, *, compress: bool = False) -> None:
    """IDX files of the split "train" or "t10k": ``images`` are uint8 of shape (count, rows, columns), labels 0 to 9."""
    labels = (torch.arange(len(images)) % 10).to(torch.uint8)
    for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
        path = directory / f"{name}-{kind}-ubyte{'.gz' if compress else ''}"
        path.write_bytes(gzip.compress(idx(values)) if compress else idx(values))


def write_images(directory: Path) -> Path:
    """Ten classes of noisy images that a few steps can tell apart, as IDX files: 640 to train with, 100 to test with.

    Unlike the digits that the examples take by default, they are there without importing scikit-learn.
    """
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(256, (10, 8, 8), generator=generator)
    for name, count in (("train", 640), ("t10k", 100)):
        noise = torch.randint(-40, 41, (count, 8, 8), generator=generator)
        write_split(directory, name, (classes[torch.arange(count) % 10] + noise).clamp(0, 255).to(torch.uint8))
    return directory
