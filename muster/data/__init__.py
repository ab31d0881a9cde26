"""The plan's samples as micro-batches on the device: read, collated and split, with random transforms keyed by sample."""
