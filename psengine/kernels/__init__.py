"""The native extension where there is one, its operators beside their references in torch, and freed memory.

May import ``environment`` and ``errors``.
"""
