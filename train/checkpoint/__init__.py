"""Checkpoints: whole or not there. manager.py saves, storage.py is the protocol, state.py the format, backends/ the places."""
