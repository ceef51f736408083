"""Which optimizers are there? Those whose state and update live in host memory, for parameters on any device."""

from headrace.optim.adam import Adam, AdamW
from headrace.optim.matrices import Adafactor, Muon
from headrace.optim.sgd import SGD, Lion

__all__ = ["SGD", "Adafactor", "Adam", "AdamW", "Lion", "Muon"]
