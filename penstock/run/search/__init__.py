"""Search for settings: trials of one experiment, whose scores decide which go on."""
