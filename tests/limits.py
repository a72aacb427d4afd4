"""How long a test waits for what it started. No machine is so slow or so busy; what hangs is found all the same."""

PATIENCE = 20 * 60.0  # seconds
