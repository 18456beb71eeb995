"""Who is still alive, and where everybody waits: asked through the rendezvous store.

May import ``tracing``.
"""
