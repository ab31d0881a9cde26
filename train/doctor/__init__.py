"""Whether this cluster can train: looked at before a long run, by the ranks that will do it. One check, one file in checks/."""
