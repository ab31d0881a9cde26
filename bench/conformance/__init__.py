"""The same faults on five trainers, and on a loop by hand with Job: each compared with its own undisturbed run: see docs/conformance.md."""
