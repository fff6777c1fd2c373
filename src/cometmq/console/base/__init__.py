"""Modules that all other packages of the console use: texts, feeds, requests to brokers, the clusters."""
