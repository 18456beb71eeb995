"""Collectives carry bytes between ranks: the interface, its registry, torch.distributed, a single rank.

Its rooms are ``shared_memory``, ``liveness``, ``torch_backend``. May import ``tracing``, ``kernels``, ``environment``
and ``errors``.
"""
