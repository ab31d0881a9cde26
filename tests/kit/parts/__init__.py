"""Parts of a user's own, named by import path from the tests."""
