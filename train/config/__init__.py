"""Compose, check and type a config from a command line."""
