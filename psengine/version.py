"""The version of psengine: at the bottom, so that every part can say it."""

__version__ = "0.1.0"
