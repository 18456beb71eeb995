"""What wraps a model and an optimizer: ``DistributedDataParallel``, ``DistributedOptimizer``, what they accept.

May import ``data``, ``gradients``, ``strategies``, ``collectives`` and all that comes after them.
"""
