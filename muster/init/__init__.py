"""`muster init`: write batch scripts, container files, manifests and an example into a user's own project."""
