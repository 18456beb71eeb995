"""Sealed memory: who may write to it, what is taken from a peer, and what stays of it."""

import os
from pathlib import Path

import pytest
import torch

from psengine.parameter_server.segment import IS_AVAILABLE, Segment

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="memfd_create is Linux")
SIZE = 8192


@pytest.fixture
def made():
    return Segment.make("psengine-worker", SIZE - 100)


def opened(segment):
    return Segment.of_process(os.getpid(), segment.descriptor)


def maps():
    return Path("/proc/self/maps").read_text().count("psengine-worker")


def test_its_owner_alone_writes_and_nobody_changes_its_size(made):
    theirs = opened(made)
    made.tensor(64, 4, torch.float32).fill_(3.0)
    assert theirs.tensor(64, 4, torch.float32).tolist() == [3.0] * 4
    other = os.open(f"/proc/self/fd/{made.descriptor}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(other, b"x", 0)
        for size in (0, SIZE // 2, 2 * SIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(other, size)
    finally:
        os.close(other)


def test_tensors_outlive_it(made):
    theirs = opened(made)
    written, read = made.tensor(64, 100, torch.float32), theirs.tensor(64, 100, torch.float32)
    written.copy_(torch.arange(100.0))
    del made, written
    assert torch.equal(read, torch.arange(100.0))
    del theirs
    assert torch.equal(read, torch.arange(100.0))


def test_private_memory_has_the_same_values_at_the_same_place_and_others_see_no_more():
    made = Segment.make("psengine-worker", SIZE)
    theirs = opened(made)
    written, read = made.tensor(0, 2048, torch.float32), theirs.tensor(0, 2048, torch.float32)
    written.copy_(torch.arange(2048.0))
    address = written.data_ptr()
    made.make_private()
    assert written.data_ptr() == address
    assert torch.equal(written, torch.arange(2048.0))
    written.fill_(7.0)
    assert torch.equal(read, torch.arange(2048.0))
    mapped = maps()
    del made, written, theirs, read
    assert maps() < mapped
