"""The same faults on five trainers, each beside its own undisturbed run: see docs/conformance.md."""
