"""The ranks of one host average in shared memory: the collective, who shares a host, segments.

May import the other modules of ``collectives``, ``tracing``, ``kernels`` and ``errors``.
"""
