"""One feature of native DDP a module: hooks, joining, mixed precision, logging data.

May import ``gradients`` and all that comes after it, but not the wrapper, which calls these.
"""
