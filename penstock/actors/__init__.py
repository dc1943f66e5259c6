"""Backends of runners, which are objects called from here: in this process, in local processes, or on Ray."""
