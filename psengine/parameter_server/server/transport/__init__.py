"""Sockets and threads of shards, who may connect, how much memory messages take.

May import ``replication`` and the rooms after it. At the server only these two and the daemon know ZeroMQ.
"""
