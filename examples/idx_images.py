"""Reads the IDX files in which MNIST and Fashion-MNIST are published, gzip-compressed or plain.

An IDX file is a big-endian header and then the values, row by row::

    bytes 0-1   zero
    byte  2     type of a value; 8: unsigned byte
    byte  3     number of dimensions: 3 for images, 1 for labels
    4 bytes     each dimension's size: count[, rows, columns]

Every number of a header is checked before memory is taken on its word. Format: Y. LeCun, C. Cortes, C. Burges, "The
MNIST database of handwritten digits".
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

LARGEST_FILE_BYTES = 1 << 30  # uncompressed; MNIST's largest file has 47 MB
IMAGE_DIMENSIONS = 3
LABEL_DIMENSIONS = 1

_FILES = {  # split -> beginning of its files' names
    "train": "train",
    "test": "t10k",
}
_UNSIGNED_BYTE = 8
_GZIP_MAGIC = b"\x1f\x8b"
_READ_BYTES = 1 << 20


class IdxError(ValueError):
    """A file is missing or is not the IDX file it should be; the message names it."""


def read_split(directory: str | Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images, uint8 of shape (count, rows, columns), and labels, uint8 of shape (count,), of a split.

    Args:
        directory: where ``train-images-idx3-ubyte``, ``t10k-labels-idx1-ubyte`` and so on lie, with ``.gz`` or without.
        split: "train" or "test".

    Raises:
        IdxError: a file is missing, unreadable or damaged, or there is not one label for each image.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise IdxError(f"{directory}: expected a directory with IDX files, got {_what_is(directory)}")
    images_path = _find(directory, f"{_FILES[split]}-images-idx{IMAGE_DIMENSIONS}-ubyte")
    labels_path = _find(directory, f"{_FILES[split]}-labels-idx{LABEL_DIMENSIONS}-ubyte")
    with IdxFile(images_path, IMAGE_DIMENSIONS) as images, IdxFile(labels_path, LABEL_DIMENSIONS) as labels:
        if images.shape[0] != labels.shape[0]:
            raise IdxError(
                f"{labels_path}: expected one label for each of the {images.shape[0]} images of {images_path.name},"
                f" got {labels.shape[0]}"
            )
        return images.read(), labels.read()


class IdxFile:
    """An open IDX file of unsigned bytes whose header has been checked; a context manager.

    Attributes:
        path: where it lies.
        shape: the dimensions its header gives.

    Raises:
        IdxError: the file cannot be read, or is no IDX file of unsigned bytes with ``dimensions`` dimensions; from
            ``read()``: it is shorter or longer than its header says.
    """

    def __init__(self, path: str | Path, dimensions: int) -> None:
        self.path = Path(path)
        try:
            self._stored_file: BinaryIO = self.path.open("rb")
        except OSError as error:
            raise IdxError(f"{self.path}: expected a readable file, got {error.strerror}") from error
        try:
            self._is_compressed = self._stored_file.read(2) == _GZIP_MAGIC
            self._stored_file.seek(0)
            self._file = gzip.GzipFile(fileobj=self._stored_file) if self._is_compressed else self._stored_file
            self.shape = self._read_header(dimensions)
        except BaseException:
            self._stored_file.close()
            raise

    def __enter__(self) -> IdxFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stored_file.close()

    def read(self) -> torch.Tensor:
        """Return the values, uint8 of this file's shape."""
        expected_bytes = math.prod(self.shape)
        # A piece at a time: what we hold is what the file had, whatever its header promised.
        values = bytearray()
        while len(values) <= expected_bytes:
            piece = self._read(min(_READ_BYTES, expected_bytes + 1 - len(values)))
            if not piece:
                break
            values += piece
        if len(values) != expected_bytes:
            got = f"at least {len(values)}" if len(values) > expected_bytes else str(len(values))
            raise IdxError(
                f"{self.path}: expected {expected_bytes} bytes of values, as the header says {self.shape}, got {got}"
            )
        return torch.frombuffer(values, dtype=torch.uint8).reshape(self.shape)

    def _read_header(self, dimensions: int) -> tuple[int, ...]:
        magic = self._read_exactly(4)
        expected = bytes((0, 0, _UNSIGNED_BYTE, dimensions))
        if magic[:2] != expected[:2]:
            raise IdxError(f"{self.path}: expected an IDX file (magic {expected.hex()}), got magic {magic.hex()}")
        if magic[2] != _UNSIGNED_BYTE:
            raise IdxError(f"{self.path}: expected unsigned bytes (type 0x{_UNSIGNED_BYTE:02x}), got 0x{magic[2]:02x}")
        if magic[3] != dimensions:
            raise IdxError(f"{self.path}: expected {dimensions} dimensions, got {magic[3]}")
        shape = struct.unpack(f">{dimensions}I", self._read_exactly(4 * dimensions))
        if 0 in shape:
            raise IdxError(f"{self.path}: expected at least one value, got dimensions {shape}")
        self.shape = shape
        expected_bytes = math.prod(self.shape)
        if expected_bytes > LARGEST_FILE_BYTES:
            raise IdxError(
                f"{self.path}: expected at most {LARGEST_FILE_BYTES} bytes of values, got a header of {shape}, which"
                f" is {expected_bytes}"
            )
        if not self._is_compressed:
            stored_bytes = os.fstat(self._stored_file.fileno()).st_size - self._stored_file.tell()
            if stored_bytes != expected_bytes:
                raise IdxError(
                    f"{self.path}: expected {expected_bytes} bytes of values, as the header says {shape},"
                    f" got {stored_bytes}"
                )
        return shape

    def _read_exactly(self, count: int) -> bytes:
        values = self._read(count)
        if len(values) != count:
            raise IdxError(f"{self.path}: expected a header of {count} more bytes, got {len(values)}")
        return values

    def _read(self, count: int) -> bytes:
        try:
            return self._file.read(count)
        except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
            kind = "an intact gzip stream" if self._is_compressed else "a readable file"
            raise IdxError(f"{self.path}: expected {kind}, got: {error}") from error


def _find(directory: Path, name: str) -> Path:
    # Some copies write a dot before "idx".
    names = [candidate + suffix for candidate in (name, name.replace("-idx", ".idx")) for suffix in ("", ".gz")]
    for candidate in names:
        if (directory / candidate).is_file():
            return directory / candidate
    raise IdxError(f"{directory}: expected {name} or {name}.gz, got neither")


def _what_is(path: Path) -> str:
    return "a file" if path.exists() else "no such directory"
