"""From autograd's hooks to "this bucket is full", and what a pass over the gradients sees on the way.

May import ``strategies``, ``collectives``, ``tracing``, ``tensors`` and all that comes after them.
"""
