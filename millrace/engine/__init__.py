"""Blocks, visits and gradients: how weights come to the device when a model computes, and how gradients leave it."""
