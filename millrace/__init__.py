"""Which names does a user import? These and no others."""

__version__ = "0.1.0"

__all__ = ["__version__"]
