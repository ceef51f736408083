"""Arenas, device buffers and the ledger: where bytes lie and how many. Knows nothing of modules."""
