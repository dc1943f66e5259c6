"""Algorithms, one file each: settings, postprocess, loss, optimizer. Importing one loads torch."""
