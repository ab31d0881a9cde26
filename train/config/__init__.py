"""From a command line to a checked, typed config."""
