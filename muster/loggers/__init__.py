"""Loggers of a run's records, one file each."""
