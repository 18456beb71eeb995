"""Training libraries over psengine: one module each, which imports its library. Nothing is imported before you do."""
