"""How ranks meet: the store, its keys, the network between hosts."""
