"""After the run: one page on what it did."""
