"""Embeddings whose rows live on parameter servers: the modules, a table at its servers, all tables of a model.

May import ``strategies``, ``collectives``, ``parameter_server.client`` and all that comes after them.
"""
