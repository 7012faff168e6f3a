"""The version of this package, also of its metadata."""

__version__ = "0.1.0"
