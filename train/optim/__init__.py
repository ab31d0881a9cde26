"""Optimizers and learning-rate schedules. A schedule, a pure function of the step, scales each group's base rate."""
