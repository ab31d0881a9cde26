"""Atomic checkpoints: manager.py saves, storage.py commits, state.py defines the format, backends/ are the storage."""
