"""One optimizer step on a model that is already distributed: forward, backward, reduction, clipping, update."""
