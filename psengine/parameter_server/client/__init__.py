"""A worker's end: connections, what is under way on each, membership, exchanges by chunk or name.

May import ``tracing``, ``tensors``, ``protocol`` and all that comes after them; nothing of the server.
"""
