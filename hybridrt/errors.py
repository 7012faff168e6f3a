"""Typed errors, as users import them."""

from typing import TYPE_CHECKING

from hybridrt.base.errors import *  # noqa: F403  # its __all__ is every error

if not TYPE_CHECKING:
    from hybridrt.base.errors import __all__ as __all__
