"""The modules that all other packages of the console use: texts, feeds, requests to brokers, and clusters."""
