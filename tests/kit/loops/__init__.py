"""Scripts with a training loop of their own, which tests copy into a user's folder."""
