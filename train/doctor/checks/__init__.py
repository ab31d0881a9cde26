"""The checks. Each file has one."""
