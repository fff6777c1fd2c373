"""The listener: connections, and the handlers of their calls."""
