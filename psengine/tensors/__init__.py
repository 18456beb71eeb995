"""Tensors as flat memory and as trees: buckets and their sizes, leaves of metrics, states as documents.

May import ``kernels`` and ``errors``.
"""
