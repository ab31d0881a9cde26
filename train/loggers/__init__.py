"""What a run says while it runs: one sink, one file."""
