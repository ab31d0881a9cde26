"""One attempt at a run, whoever's loop it is: where it begins, what every loop does beside its steps, and how it ends."""
