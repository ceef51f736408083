"""What moves bytes, and knows nothing of models? Streams, events, copies, pinned memory."""
