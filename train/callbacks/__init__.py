"""What happens beside the loop, on every rank. One callback, one file, and a yaml under conf/callbacks/."""
