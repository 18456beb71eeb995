"""Sends payloads without a copy, and without the thread of pyzmq that would release each one's memory.

pyzmq lets a thread of its own drop the reference to a payload that has left. It takes the GIL for every message: 40 µs
of processor beside each MiB, at both ends. Here libzmq sets a flag instead (csrc/bindings/library.cpp, ``note_sent``),
and the thread that sends looks at the flags. Without the native extension pyzmq's own way is taken.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import zmq

from psengine.kernels.native import extension

# Flags that libzmq may still set, with their payloads, of senders that were closed meanwhile.
_left_behind: list[tuple[ctypes.c_int64 | zmq.MessageTracker, memoryview, bytes]] = []
_Message = ctypes.c_uint64 * 8  # zmq_msg_t


def _library() -> Any:
    """The libzmq that pyzmq has loaded; None where there is none, or no function for its flags."""
    try:
        from zmq.backend.cython import _zmq

        library = ctypes.PyDLL(_zmq.__file__)
        library.zmq_msg_init_data.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] + [ctypes.c_void_p] * 2
        library.zmq_msg_send.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        library.zmq_msg_close.argtypes = [ctypes.c_void_p]
    except (ImportError, OSError, AttributeError):
        return None
    return library if hasattr(extension, "note_sent") else None


_zmq_library = _library()


class ZeroCopySends:
    """Of one socket; used by the socket's thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        # Payloads whose bytes have not left, each with the flag that libzmq sets then, and whose it is.
        self._held: list[tuple[ctypes.c_int64 | zmq.MessageTracker, memoryview, bytes]] = []
        self._bytes_of: Counter[bytes] = Counter()

    def send(self, payload: memoryview, route: bytes = b"") -> None:
        """Send the last frame of a message whose first frames libzmq has taken; it must not change until it has left.

        Raises:
            zmq.ZMQError: the socket is closed.
        """
        self.release()
        if _zmq_library is None or payload.readonly or not payload.nbytes:
            tracker = self._socket.send(payload, zmq.NOBLOCK, copy=False, track=True)
            assert tracker is not None
            self._hold(tracker, payload, route)
            return
        sent, message = ctypes.c_int64(0), _Message()
        at, flag = ctypes.addressof(message), ctypes.addressof(sent)
        address = ctypes.addressof(ctypes.c_char.from_buffer(payload))
        self._hold(sent, payload, route)
        _zmq_library.zmq_msg_init_data(at, address, payload.nbytes, extension.note_sent, flag)
        if _zmq_library.zmq_msg_send(at, self._socket.underlying, zmq.NOBLOCK) < 0:
            error = zmq.ZMQError()
            _zmq_library.zmq_msg_close(at)
            raise error

    def _hold(self, flag: ctypes.c_int64 | zmq.MessageTracker, payload: memoryview, route: bytes) -> None:
        self._held.append((flag, payload, route))
        self._bytes_of[route] += payload.nbytes

    def unread_bytes(self, route: bytes | None = None) -> int:
        """Bytes of payloads for this peer, or for all, that have not left."""
        return self._bytes_of.total() if route is None else self._bytes_of[route]

    def release(self) -> None:
        """Drop the references to payloads that have left."""
        held, self._held = self._held, []
        for one in held:
            flag, payload, route = one
            if not _has_left(flag):
                self._held.append(one)
                continue
            self._bytes_of[route] -= payload.nbytes
            if not self._bytes_of[route]:
                del self._bytes_of[route]

    def close(self) -> None:
        """Nothing is sent any more; libzmq may still read, and set flags."""
        _left_behind[:] = [one for one in (*_left_behind, *self._held) if not _has_left(one[0])]
        self._held = []


def _has_left(flag: ctypes.c_int64 | zmq.MessageTracker) -> bool:
    return bool(flag.value) if isinstance(flag, ctypes.c_int64) else flag.done
