"""Survival of a rank's death: the supervisor that starts it again in place, what outlives it, and the hand-over of the state."""
