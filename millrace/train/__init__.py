"""The reference trainer behind `millrace train`; `millrace.train.trainer.train` is its entrance."""
