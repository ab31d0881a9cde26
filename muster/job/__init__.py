"""`Job`: the door for a training loop of a user's own."""
