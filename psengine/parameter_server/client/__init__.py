"""A worker's end: connections, operations in flight, membership, exchanges by chunk or by name.

May import ``tracing``, ``tensors``, ``protocol`` and all that comes after them; nothing of the server.
"""
