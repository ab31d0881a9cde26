"""Checks of a cluster before a long run, made by the ranks that will train. Each check has a file in checks/."""
