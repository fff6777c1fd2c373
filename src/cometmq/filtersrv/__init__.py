"""The filter server: runs filter classes that consumers upload, each in a process beside the broker."""
