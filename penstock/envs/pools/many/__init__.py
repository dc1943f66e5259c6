"""Parts of the pools of many agents: present agents, their seats, their records, and restoring these."""
