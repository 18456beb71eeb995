"""Tensors as flat memory and as trees: buckets and their sizes, outputs of a forward, leaves of metrics.

May import ``kernels`` and ``errors``.
"""
