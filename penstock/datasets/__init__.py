"""Datasets of whole recorded episodes: reading, writing, and cutting episodes out of batches."""
