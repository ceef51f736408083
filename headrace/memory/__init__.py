"""Where do bytes lie, and how many are they? Arenas, device buffers and the ledger; nothing here knows modules."""
