"""Memory that a worker shares with the servers of its host: which places it has, how it is made, checked and passed on.

See ``docs/protocol.md``, "Shared memory".
"""
