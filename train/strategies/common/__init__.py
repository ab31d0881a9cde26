"""What several strategies share: steps on a model laid out already, and what they are made of."""
