"""Analytical model of step time, memory and bytes sent of each strategy at large world sizes."""
