"""Many runs on one machine."""
