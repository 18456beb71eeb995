"""What travels in the place of a tensor's values: codecs, by name. Pure: no sockets, no ranks.

May import ``kernels`` and ``errors``.
"""
