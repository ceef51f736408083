"""How does training survive its process? Checkpoints: whole or not there, checked, from any tier and into any."""

from headrace.checkpoint.directory import newest

__all__ = ["newest"]
