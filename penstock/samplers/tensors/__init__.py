"""The loop's views, the account and the checks of batches of tensors, which lie where their environments are."""
