"""All-reduce algorithms built from send and receive: checked, timed and compared with theory."""
