"""Adapters that make CometMQ the broker of other frameworks."""
