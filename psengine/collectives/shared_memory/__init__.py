"""The ranks of one host average in shared memory: the collective, joining it, segments.

May import the other modules of ``collectives``, ``tracing``, ``kernels`` and ``errors``.
"""
