"""Sealed memory: what is taken from a peer, and what stays of it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch

from psengine.errors import ProtocolError
from psengine.parameter_server.segments import memory
from psengine.parameter_server.segments.memory import (
    IS_AVAILABLE,
    SegmentMapping,
    check_segment,
    make_lent_segment,
    make_segment,
)

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="memfd_create is Linux")
SIZE = 8192


@pytest.fixture
def segment():
    descriptor = make_segment(SIZE)
    yield descriptor
    os.close(descriptor)


def sealed(seals, flags=os.MFD_ALLOW_SEALING if IS_AVAILABLE else 0):
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | flags)
    os.ftruncate(descriptor, SIZE)
    if seals:
        fcntl.fcntl(descriptor, 1033, seals)
    return descriptor


def maps():
    return Path("/proc/self/maps").read_text().count("psengine-worker")


def test_a_segment_keeps_its_size(segment):
    check_segment(segment, SIZE, SIZE)
    for size in (0, SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(segment, size)


def test_lent_memory_is_written_by_its_owner_alone():
    descriptor, mine = make_lent_segment(SIZE)
    try:
        check_segment(descriptor, SIZE, SIZE)
        theirs = SegmentMapping(descriptor, SIZE, is_written=False)
        mine.tensor(64, 4, torch.float32).fill_(3.0)
        assert theirs.tensor(64, 4, torch.float32).tolist() == [3.0] * 4
        for opened in (descriptor, os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)):
            with pytest.raises(ProtocolError, match="could not be mapped"):
                SegmentMapping(opened, SIZE)
            with pytest.raises(PermissionError):
                os.pwrite(opened, b"x", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(opened, 0)
        os.close(opened)
    finally:
        os.close(descriptor)


def test_under_strict_overcommit_pages_are_there_before_they_are_touched(monkeypatch, tmp_path):
    setting = tmp_path / "overcommit_memory"
    monkeypatch.setattr(memory, "OVERCOMMIT", setting)
    for mode, pages in (("0\n", 0), ("2\n", 16)):
        setting.write_text(mode)
        descriptor = make_segment(16 * 4096)
        try:
            assert os.fstat(descriptor).st_blocks * 512 == pages * 4096
        finally:
            os.close(descriptor)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: sealed(0), r"must be sealed .* got 0\)"),
        (lambda _: sealed(2), r"must be sealed .* got 2\)"),
        (lambda _: sealed(1 | 2), r"must be sealed .* got 3\)"),
        (lambda _: sealed(0, 0), "must be sealed"),
        (lambda path: os.open(path / "file", os.O_RDWR | os.O_CREAT), "got another kind of file"),
        (lambda _: os.open("/dev/null", os.O_RDWR), "got another kind of file"),
        (lambda _: os.eventfd(0), "got another kind of file"),
    ],
)
def test_other_files_are_refused(make, words, tmp_path):
    descriptor = make(tmp_path)
    try:
        with pytest.raises(ProtocolError, match=words):
            check_segment(descriptor, SIZE, SIZE)
    finally:
        os.close(descriptor)


def test_sizes_are_checked(segment):
    with pytest.raises(ProtocolError, match="expected 4096 bytes by its offer, got 8192"):
        check_segment(segment, 4096, SIZE)
    with pytest.raises(ProtocolError, match="too large"):
        check_segment(segment, SIZE, 4096)


def test_memory_that_cannot_be_written_is_refused():
    descriptor = sealed(1 | 2 | 4 | 8)
    try:
        check_segment(descriptor, SIZE, SIZE)
        with pytest.raises(ProtocolError, match="could not be mapped"):
            SegmentMapping(descriptor, SIZE)
    finally:
        os.close(descriptor)


def test_tensors_outlive_descriptor_and_mapping(segment):
    mine, theirs = SegmentMapping(segment, SIZE), SegmentMapping(segment, SIZE)
    written, read = mine.tensor(64, 100, torch.float32), theirs.tensor(64, 100, torch.float32)
    written.copy_(torch.arange(100.0))
    del mine, written
    assert torch.equal(read, torch.arange(100.0))
    del theirs
    assert torch.equal(read, torch.arange(100.0))


def test_detached_memory_has_the_same_values_at_the_same_place_and_others_see_no_more(segment):
    mine, theirs = SegmentMapping(segment, SIZE), SegmentMapping(segment, SIZE)
    written, read = mine.tensor(0, 2048, torch.float32), theirs.tensor(0, 2048, torch.float32)
    written.copy_(torch.arange(2048.0))
    address = written.data_ptr()
    mine.detach()
    assert written.data_ptr() == address
    assert torch.equal(written, torch.arange(2048.0))
    written.fill_(7.0)
    assert torch.equal(read, torch.arange(2048.0))
    read.fill_(8.0)
    assert torch.equal(written, torch.full((2048,), 7.0))
    mapped = maps()
    del mine, written, theirs, read
    assert maps() == mapped - 1
