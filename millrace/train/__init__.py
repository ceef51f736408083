"""What does `millrace train` do? The reference trainer; `millrace.train.trainer.train` is its entrance."""
