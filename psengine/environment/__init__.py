"""Where this process stands: launchers' variables, the rendezvous, how psengine was installed.

``variables`` alone reads ``os.environ``. May import ``errors``.
"""
