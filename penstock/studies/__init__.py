"""Many runs: trials in slots, sweeps and searches, their queue, display and result."""
