"""Strategies: how an optimizer step runs across ranks. One file and one yaml each; base.py defines the interface."""
