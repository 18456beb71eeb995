"""Sends payloads without a copy, and without the thread of pyzmq that would release each one's memory.

pyzmq lets a thread of its own drop the reference to a payload that has left. It takes the GIL for every message: 40 µs
of processor beside each MiB, at both ends. Here libzmq sets a flag instead (csrc/bindings/library.cpp, ``note_sent``),
and the thread that sends looks at the flags. Without the native extension pyzmq's own way is taken.
"""

from __future__ import annotations

import ctypes
from typing import Any

import zmq

from psengine.kernels.native import extension

# Flags that libzmq may still set, with their payloads, of senders that were closed meanwhile.
_left_behind: list[tuple[ctypes.c_int64, memoryview]] = []
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
        # Payloads whose bytes have not left, each with the flag that libzmq sets then.
        self._held: list[tuple[ctypes.c_int64, memoryview]] = []

    def send(self, payload: memoryview) -> None:
        """Send the last frame of a message whose first frames libzmq has taken; it must not change until it has left.

        Raises:
            zmq.ZMQError: the socket is closed.
        """
        if _zmq_library is None or payload.readonly or not payload.nbytes:
            self._socket.send(payload, zmq.NOBLOCK, copy=False)
            return
        self.release()
        sent, message = ctypes.c_int64(0), _Message()
        at, flag = ctypes.addressof(message), ctypes.addressof(sent)
        address = ctypes.addressof(ctypes.c_char.from_buffer(payload))
        self._held.append((sent, payload))
        _zmq_library.zmq_msg_init_data(at, address, payload.nbytes, extension.note_sent, flag)
        if _zmq_library.zmq_msg_send(at, self._socket.underlying, zmq.NOBLOCK) < 0:
            error = zmq.ZMQError()
            _zmq_library.zmq_msg_close(at)
            raise error

    def release(self) -> None:
        """Drop the references to payloads that have left."""
        if self._held:
            self._held = [one for one in self._held if not one[0].value]

    def close(self) -> None:
        """Nothing is sent any more; libzmq may still read, and set flags."""
        self.release()
        _left_behind[:] = [*(one for one in _left_behind if not one[0].value), *self._held]
        self._held = []
