"""Detect failures, report them and recover from them."""
