"""How does training survive its process? Checkpoints: complete or absent, checked, from any tier and into any."""

from headrace.checkpoint.directory import newest

__all__ = ["newest"]
