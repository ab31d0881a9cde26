"""The position of this process among the ranks, and communication between ranks."""
