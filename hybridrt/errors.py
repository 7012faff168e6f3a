"""Typed errors, as users import them."""

from hybridrt.base.errors import *  # noqa: F403  # its __all__ is every error
