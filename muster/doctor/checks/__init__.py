"""The doctor's checks, one per file."""
