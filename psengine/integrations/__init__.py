"""Training libraries over psengine: one module each, which imports its library.

Nothing is imported before you do. May import the public names, ``wrapper`` and all that comes after it.
"""
