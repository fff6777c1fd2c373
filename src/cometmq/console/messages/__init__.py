"""The pages of messages: search, one message, traces, dead letters, timers, transactions."""
