"""The life of a job's attempt: its claims, its records and its end."""
