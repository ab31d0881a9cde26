"""The same faults on five trainers, each compared with its own undisturbed run: see docs/conformance.md."""
