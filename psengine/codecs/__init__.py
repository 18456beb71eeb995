"""Codecs, by name: they turn values into payloads and back. Pure: no sockets, no ranks.

May import ``kernels`` and ``errors``.
"""
