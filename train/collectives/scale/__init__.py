"""Step time, memory and bytes of each strategy at world sizes that nobody here has: a model, on paper."""
