"""A disk in memory that can be filled, that fails as it is told, and that loses what was not synced."""

from __future__ import annotations

import errno

from psengine.parameter_server.server.log.disk import UNFINISHED


class MemoryDisk:
    """``psengine.parameter_server.server.log.disk.Disk``; ``files`` are the bytes by name."""

    def __init__(self, files=None):
        self.files = {name: bytearray(content) for name, content in (files or {}).items()}
        self.synced_bytes = {}
        self.syncs = 0
        self.capacity_bytes = 1 << 40
        self.sync_error = 0  # an errno

    def list(self):
        return sorted(self.files)

    def create(self, name):
        assert name not in self.files
        self.files[UNFINISHED + name] = bytearray()
        return MemoryFile(self, UNFINISHED + name)

    def delete(self, name):
        self.files.pop(name, None)

    def size_bytes(self, name):
        return len(self.files[name])

    def read(self, name, offset, size_bytes):
        return bytes(self.files[name][offset : offset + size_bytes])

    def free_bytes(self):
        return self.capacity_bytes - sum(map(len, self.files.values()))

    def after_power_loss(self):
        """A disk with what was synced."""
        return MemoryDisk({name: content[: self.synced_bytes.get(name, 0)] for name, content in self.files.items()})


class MemoryFile:
    def __init__(self, disk, name):
        self.disk, self.name, self.end = disk, name, 0

    def append(self, pieces):
        content = b"".join(bytes(piece) for piece in pieces)
        room = self.disk.free_bytes()
        file = self.disk.files[self.name]
        file[self.end :] = content[:room] if len(content) > room else content
        if len(content) > room:
            raise OSError(errno.ENOSPC, "No space left on device", self.name)
        self.end += len(content)

    def sync(self):
        self.disk.syncs += 1
        if self.disk.sync_error:
            raise OSError(self.disk.sync_error, "sync failed", self.name)
        self.disk.synced_bytes[self.name] = self.end

    def commit(self):
        self.sync()
        complete = self.name.removeprefix(UNFINISHED)
        for by_name in (self.disk.files, self.disk.synced_bytes):
            by_name[complete] = by_name.pop(self.name)
        self.name = complete

    def close(self):
        pass
