"""Worker processes, their supervisor, and the pool of environments that they step."""
