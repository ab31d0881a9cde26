"""Where the time of a run goes, rank by rank."""
