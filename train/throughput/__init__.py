"""How fast a run is, in the terms of its field: tokens per second, utilization of the device, its memory."""
