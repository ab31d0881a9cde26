"""What is minimised and what is measured."""
