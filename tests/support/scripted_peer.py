"""A server of a script's making, for what no real server does: losses, delays, repeats and nonsense."""

import socket
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress

import torch
import zmq

from psengine.parameter_server.client.partition import cut
from psengine.protocol.frames import decode, encode, payload_tensor
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import Message, MessageType
from psengine.protocol.views import View, ViewMember, message_of

SPECS = cut(ChunkKind.PARAMETER, [("weight", (100,), (1,), 100)], torch.float32, 0, 256)
INCARNATION = 7
HEARTBEAT_S = 0.2
KEY = b"k" * 32

T = MessageType


class Peer:
    """A ROUTER that answers as coordinator and shard would, except where ``script`` says otherwise.

    ``script[type]`` is called with (peer, route, message) and returns the answer, frames, a list of those, or None.
    """

    def __init__(self):
        self.script = {}
        self.seen = Counter()
        self.epoch = 1
        self.messages = []
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.address = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self.error = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            while not self._is_stopping:
                if not self.router.poll(20):
                    continue
                route, *frames = self.router.recv_multipart(copy=False)
                message = decode(frames)
                self.seen[message.type] += 1
                self.messages.append(message)
                handler = self.script.get(message.type, lambda peer, route, m: peer.answer(m))
                answers = handler(self, route.bytes, message)
                for answer in answers if isinstance(answers, list) else [answers]:
                    if answer is not None:
                        frames = encode(answer) if isinstance(answer, Message) else answer
                        self.router.send_multipart([route.bytes, *frames])
        except Exception as error:
            self.error = error
        finally:
            self.router.close()

    def reply(self, request, kind, **fields):
        usual = {"job": request.job, "key": request.key, "sequence": request.sequence, "view": 1}
        usual |= {"worker": 0, "incarnation": INCARNATION, "epoch": self.epoch}
        return Message(kind, **{**usual, **fields})

    def answer(self, message):
        kind = message.type
        if kind is T.HELLO:
            return [self.reply(message, T.WELCOME, body=self.welcome()), self.view(message)]
        if kind is T.RESUME:
            return self.reply(message, T.RESUMED, body=self.resumed())
        if kind is T.PUSH:
            return self.reply(message, T.UPDATED, version=message.sequence, payload=payload_tensor(message) * 2)
        if kind is T.PULL:
            return self.reply(message, T.VALUES, payload=torch.ones(SPECS[message.key].numel))
        if kind is T.LIST:
            chunks = [spec.to_body() for spec in SPECS]
            return self.reply(message, T.CHUNKS, body={"chunks": chunks, "more": False})
        if kind is T.ECHO:
            return self.reply(message, T.ECHOED, payload=payload_tensor(message))
        return None if kind in (T.VIEW, T.RELEASE, T.WAITS) else self.reply(message, T.OK)

    def welcome(self):
        return {"state": "ready", "lease_s": 5.0, "heartbeat_s": HEARTBEAT_S, "key": KEY}

    def view(self, message):
        view = View(1, self.epoch, (ViewMember(0, INCARNATION, "", 1),), (self.epoch,))
        signed = message_of(view, KEY, message.job)
        signed.epoch, signed.view = self.epoch, view.number
        return signed

    def resumed(self):
        return {
            "shards": [self.address],
            "registration": 1,
            "chunks": len(SPECS),
            "version": 0,
            "view": 1,
            "view_epoch": self.epoch,
            "missing": [],
        }

    def close(self):
        self._is_stopping = True
        self._thread.join()
        self.context.term()


@contextmanager
def stranger(answer=None):
    """Another program's address: it ends a connection with ``answer`` once something came; None: it says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:

        def serve():
            with suppress(OSError):
                while True:
                    taken = stack.enter_context(listener.accept()[0])
                    if answer is not None and taken.recv(1024):
                        taken.sendall(answer)
                        taken.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
