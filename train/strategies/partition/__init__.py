"""Models that are divided over ranks: where they are cut, and what such a division rules out."""
