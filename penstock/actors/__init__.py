"""Where the runners of an EnvRunnerGroup live: in this process, in local processes, or on Ray."""
