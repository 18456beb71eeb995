"""Tensors as flat memory and as trees: buckets and their sizes, leaves of metrics.

May import ``kernels`` and ``errors``.
"""
