"""A server of a script's making, for what no real server does: losses, delays, repeats and nonsense."""

from __future__ import annotations

import threading
from collections import Counter

import torch
import zmq

from psengine.parameter_server.client.partition import cut
from psengine.protocol.frames import decode, encode, payload_tensor
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import Message, MessageType

RULE = {"name": "apply", "max_staleness": None, "staleness_scaling": None, "delay_compensation": 0.0}


SPECS = cut(ChunkKind.PARAMETER, [("weight", (100,), (1,), 100)], torch.float32, 0, 256)


T = MessageType


class Peer:
    """A ROUTER that answers as a server would, except where ``script`` says otherwise.

    ``script[type]`` is called with (peer, route, message) and returns the answer, frames, a list of those, or None.
    """

    def __init__(self):
        self.script = {}
        self.seen = Counter()
        self.epoch = 1
        self.incarnation = 0
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
        usual = {"job": request.job, "key": request.key, "sequence": request.sequence}
        usual |= {"worker": 0, "incarnation": self.incarnation, "epoch": self.epoch}
        return Message(kind, **{**usual, **fields})

    def answer(self, message):
        kind = message.type
        if kind is T.HELLO:
            self.incarnation += 1
            return self.reply(message, T.WELCOME, body=self.welcome())
        if kind is T.PUSH:
            return self.reply(message, T.UPDATED, version=message.sequence, payload=payload_tensor(message) * 2)
        if kind is T.PROBE:
            return self.reply(message, T.MISSING)
        if kind is T.PULL:
            return self.reply(message, T.VALUES, payload=torch.ones(SPECS[message.key].numel))
        if kind is T.LIST:
            chunks = [spec.to_body() for spec in SPECS]
            return self.reply(message, T.CHUNKS, body={"chunks": chunks, "more": False, "total": len(chunks)})
        if kind is T.ECHO:
            return self.reply(message, T.ECHOED, payload=payload_tensor(message))
        if kind is T.HEARTBEAT:
            return self.reply(message, T.HEARTBEAT_ACK, body={"members": [0], "durable_version": None})
        return self.reply(message, T.OK)

    def welcome(self):
        return {
            "state": "ready",
            "shards": [self.address],
            "shard_index": 0,
            "lease_s": 5.0,
            "heartbeat_s": 0.2,
            "credit_bytes": 1 << 20,
            "members": [0],
            "fingerprint": 0,
            "chunks": len(SPECS),
            "started": False,
            "durable_version": None,
            "rule": RULE,
            "software": "test",
        }

    def close(self):
        self._is_stopping = True
        self._thread.join()
        self.context.term()
