"""Networks of a user's own inside the default agents: made, loaded and checked before anything is collected."""
