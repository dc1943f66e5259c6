"""Names that settings do not have, and what they stand for: hints, and the names of other libraries as data."""
