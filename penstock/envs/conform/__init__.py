"""What environments of others return, as the contract wants it: single values, and whole environments of many agents."""
