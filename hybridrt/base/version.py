"""The version of this package, which its metadata is made from."""

__version__ = "0.1.0"
