"""The loop's views, the episode tracker and checks of batches of tensors, which lie where their environments are."""
