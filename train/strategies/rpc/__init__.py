"""Strategies with a server rank, over torch.distributed.rpc."""
