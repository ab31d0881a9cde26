"""Where this process stands among the others, and how they talk."""
