"""How one optimizer step is carried out across the world: one file and one yaml each. base.py is the seam."""
