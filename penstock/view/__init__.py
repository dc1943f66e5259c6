"""A page of runs, served on this machine's own address: `penstock view`."""
