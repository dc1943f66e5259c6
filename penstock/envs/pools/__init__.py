"""Pools: step many environments and write their answers into a batch."""
