"""Launch a job: one policy for every substrate, decided by pure functions."""
