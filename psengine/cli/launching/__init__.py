"""One launched training: decided, started, watched, ended; for ``psengine run`` and ``psengine advise``."""
