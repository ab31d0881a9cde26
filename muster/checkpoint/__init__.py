"""Atomic checkpoints: manager.py saves, commit.py commits, state.py defines the format, backends/ are the storage."""
