"""The filter server: it runs filter classes that consumers upload, each class in its own worker process."""
