"""Streams, events, copies, pinning and probing: what moves bytes, and knows nothing of models."""
