"""How ranks add up: sums in a fixed order, in shared memory, during the backward pass."""
