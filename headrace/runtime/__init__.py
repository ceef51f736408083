"""What lies under everything else, and knows no offloaded model? Streams, events, copies, threads, ranks, autograd."""
