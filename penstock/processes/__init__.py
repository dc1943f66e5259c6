"""Processes that penstock starts: each is a `Child`, tied to this process by a `Tether`."""
