"""Where runners live, objects whose methods are called from here: in this process, in local processes, or on Ray."""
