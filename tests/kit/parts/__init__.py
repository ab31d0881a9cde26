"""Custom parts that tests name by import path."""
