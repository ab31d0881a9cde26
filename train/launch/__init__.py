"""How a job is launched: one policy for every substrate, decided by pure functions."""
