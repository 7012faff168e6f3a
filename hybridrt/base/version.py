"""The version of this package; its metadata is made of it, too."""

__version__ = "0.1.0"
