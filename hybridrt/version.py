"""The version of this package, as users import it."""

from hybridrt.base.version import __version__ as __version__
