"""Text that every machine with Python has: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from rank_errors import UserError

# Not its tests, nor its tables of characters, which are long and say little.
LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "pydoc_data")


@dataclass(frozen=True)
class Text:
    """Bytes, uint8 of shape (count,): those to train on and those to judge by, of different files."""

    train: torch.Tensor
    validation: torch.Tensor
    file_count: int


def load_text(directory: Path | None, most_bytes: int) -> Text:
    """Return the Python files below ``directory`` (default: the standard library's), every tenth for validation.

    Raises:
        UserError: there are none, or too few.
    """
    root = directory or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if not set(p.relative_to(root).parts) & set(LEFT_OUT))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    size_bytes = count = 0
    for index, path in enumerate(paths):
        content = path.read_bytes()
        parts[index % 10 == 9].append(content)
        size_bytes += len(content)
        count += 1
        if size_bytes >= most_bytes:
            break
    train, validation = (b"\n".join(parts[is_validation]) for is_validation in (False, True))
    if min(len(train), len(validation)) < 10_000:
        raise UserError(
            f"--text: expected Python files of at least 100 kB in {root}, got {size_bytes} bytes in {count}"
        )
    tensors = (torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in (train, validation))
    return Text(*tensors, file_count=count)


def random_batch(
    text: torch.Tensor, batch_size: int, context_length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of ``text`` at random places, and the same one byte further: int64 of shape (batch, context)."""
    starts = torch.randint(len(text) - context_length - 1, (batch_size, 1), generator=generator)
    places = starts + torch.arange(context_length + 1)
    pieces = text[places].long()
    return pieces[:, :-1], pieces[:, 1:]
