"""Code that several strategies share: optimizer steps on a model that is already distributed, and their parts."""
