"""What the benchmarks learn: Fashion-MNIST, and the source of Python's standard library as text."""

from __future__ import annotations

import gzip
import sys
import sysconfig
from pathlib import Path

import torch

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts it
PIXEL_MEAN, PIXEL_DEVIATION = 0.286, 0.353
# Of the standard library: tests, and tables of characters, which are long and say little.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "pydoc_data"}
IMAGE_HEADER_BYTES, LABEL_HEADER_BYTES = 16, 8  # of an IDX file


def fashion_mnist(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, uint8 of shape (count, 784), and labels, int64 of shape (count,), of "train" or "t10k"."""
    if not FASHION_MNIST.is_dir():
        sys.exit(f"{FASHION_MNIST} is missing; Debian and Ubuntu: apt install dataset-fashion-mnist")
    images, labels = (
        torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())[header:]), dtype=torch.uint8)
        for path, header in (
            (FASHION_MNIST / f"{split}-images-idx3-ubyte.gz", IMAGE_HEADER_BYTES),
            (FASHION_MNIST / f"{split}-labels-idx1-ubyte.gz", LABEL_HEADER_BYTES),
        )
    )
    return images.view(-1, 784), labels.long()


def normalized(images: torch.Tensor) -> torch.Tensor:
    return (images.float() / 255 - PIXEL_MEAN) / PIXEL_DEVIATION


def library_text(most_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the standard library's files, uint8; every tenth file is for validation."""
    root, size_bytes = Path(sysconfig.get_paths()["stdlib"]), 0
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    paths = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    for index, path in enumerate(paths):
        parts[index % 10 == 9].append(path.read_bytes())
        size_bytes += path.stat().st_size
        if size_bytes >= most_bytes:
            break
    train, validation = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, validation


def pieces(
    text: torch.Tensor, count: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of ``text`` at random places, int64 of shape (count, length), and the byte after each."""
    starts = torch.randint(len(text) - length - 1, (count, 1), generator=generator)
    found = text[starts + torch.arange(length + 1)].long()
    return found[:, :-1], found[:, -1]
