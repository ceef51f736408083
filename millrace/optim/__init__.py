"""Which optimizers are there? Those whose state and update live in host memory, for parameters on any device."""

from millrace.optim.adam import Adam, AdamW
from millrace.optim.matrices import Adafactor, Muon
from millrace.optim.sgd import SGD, Lion

__all__ = ["SGD", "Adafactor", "Adam", "AdamW", "Lion", "Muon"]
