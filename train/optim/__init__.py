"""Optimizers, and learning-rate schedules: the factor on each group's base rate, a pure function of the step."""
