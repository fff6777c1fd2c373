"""The filter server: runs filter classes that consumers upload, in processes of their own beside a broker."""
