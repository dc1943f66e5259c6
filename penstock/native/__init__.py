"""The native kernel: dense layers of float32 by C, the same bits on every processor (`kernel.c`)."""
