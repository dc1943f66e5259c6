"""Policies shared through the Hugging Face Hub."""
