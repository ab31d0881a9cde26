"""What can go wrong, found, said and survived."""
