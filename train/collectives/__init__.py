"""All-reduce algorithms built from send and receive: checked, timed, and held against what theory says of them."""
