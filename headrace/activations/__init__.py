"""What does autograd save, and where does it wait for backward? On the host, where that costs nothing."""
