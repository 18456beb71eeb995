"""Pure: when an update of a chunk is applied, and when its answer may leave.

May import ``status_port.status_model``, ``flat_optimizers``, ``protocol``, ``kernels`` and ``errors``.
"""
