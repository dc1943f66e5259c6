"""Datasets: whole recorded episodes, read, written and cut out of batches."""
