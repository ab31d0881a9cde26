"""Reports on runs: an HTML page, and a live view in the terminal."""
