"""The backend "psengine" of torch.distributed: a process group over shared memory.

May import the other modules of ``collectives`` and ``errors``.
"""

NAME = "psengine"
