"""Parts of the pools of many agents: who is there, where they sit, what they did, and how that is restored."""
