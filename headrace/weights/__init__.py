"""How are weights offloaded? The model's side, where blocks rest, how they move, and what a pass does."""
