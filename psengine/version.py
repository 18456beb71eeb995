"""The version of psengine, in the one place that has it: at the bottom, so that every part can say it."""

__version__ = "0.1.0"
