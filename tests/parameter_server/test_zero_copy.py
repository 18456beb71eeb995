"""Payloads that libzmq reads where they are: what arrives, and when their memory is free."""

import gc
import threading
import time
import weakref

import pytest
import torch
import zmq
from support.scripted_peer import stranger
from support.waiting import eventually

from psengine.kernels.native import extension
from psengine.parameter_server.zero_copy import ZeroCopySends
from psengine.protocol.frames import buffer_of

pytestmark = pytest.mark.skipif(not hasattr(extension, "note_sent"), reason="needs the native extension")


@pytest.fixture
def sockets():
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.linger = right.linger = 0
        left.rcvtimeo = 10_000
        right.connect(f"tcp://127.0.0.1:{left.bind_to_random_port('tcp://127.0.0.1')}")
        yield left, right


def test_the_bytes_arrive_and_the_memory_is_free_afterwards(sockets):
    left, right = sockets
    sends = ZeroCopySends(right)
    before = set(threading.enumerate())
    for number in range(20):
        values = torch.full((200_000,), float(number))
        right.send(b"header", zmq.SNDMORE)
        sends.send(buffer_of(values))
        header, payload = left.recv_multipart()
        assert header == b"header"
        assert torch.equal(torch.frombuffer(bytearray(payload), dtype=torch.float32), values)
    eventually(lambda: sends.release() or not sends._held)
    assert before.issuperset(threading.enumerate())  # pyzmq's thread was not needed


def test_memory_is_held_as_long_as_it_may_be_read():
    with stranger() as deaf, zmq.Context() as context, context.socket(zmq.PAIR) as unread:
        unread.linger = 0
        unread.connect(deaf)  # nobody answers its greeting
        sends = ZeroCopySends(unread)
        buffer = buffer_of(torch.zeros(1000))
        reference = weakref.ref(buffer)
        sends.send(buffer)
        del buffer
        time.sleep(0.05)
        sends.release()
        gc.collect()
        assert reference() is not None
        unread.close()
        eventually(lambda: sends.release() or reference() is None)
