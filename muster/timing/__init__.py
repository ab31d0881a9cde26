"""Time accounting of a run, by rank."""
